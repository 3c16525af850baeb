"""Weights of a layer, and of a decoder's ends, as read, before an executor lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.linear import LinearPart
    from appliance.model.norm import Norm


@dataclass(frozen=True, slots=True)
class MLPWeights:
    gate_up: list[LinearPart]  # rows of gate, then of up; up alone without a gate
    down: LinearPart


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms of the stream for router and experts, and of the outputs of MLP and experts."""

    router: Norm
    input: Norm
    shared: Norm
    output: Norm


@dataclass(frozen=True, slots=True)
class TokenInputWeights:
    """Weights of the per-layer inputs from tokens; see `TokenInputSpec`."""

    embedding: Weight  # (vocab_size, num_layers * width)
    projection: LinearPart
    norm: Norm


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """Weights that add a layer's input to the stream."""

    gate: LinearPart
    up: LinearPart
    norm: Norm


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """Weights of a layer's experts; each expert is read on request."""

    router: Tensor  # (num_experts, hidden_size) float32
    router_bias: Tensor | None  # (num_experts,) float32
    selection_bias: Tensor | None  # (num_experts,) float32
    expert: Callable[[int], MLPWeights]
    shared: MLPWeights | None
    shared_gate: Tensor | None  # (1, hidden_size) float32
    expert_scale: Tensor | None  # (num_experts,) float32
    norms: ExpertNorms | None
    latent: tuple[LinearPart, LinearPart] | None = None  # into it and out of it


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    inputs: list[LinearPart]  # rows of query heads, key heads, value heads, gates
    output: LinearPart
    query_norm: Norm | None
    key_norm: Norm | None
    value_norm: Norm | None  # its weight is 1
    sinks: Tensor | None  # (num_heads,) float32


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of latent attention; rotated rows are in halves."""

    inputs: list[LinearPart]  # rows of queries or their latents; of the cached token
    queries: LinearPart | None  # maps normed query latents to query heads
    query_norm: Norm | None
    norm: Norm  # of latents
    keys: Tensor  # (num_heads, plain_dim, latent)
    values: Tensor  # (num_heads, value_dim, latent)
    output: LinearPart


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    inputs: list[LinearPart]
    output: LinearPart
    filters: Tensor  # (width, taps) float32
    bias: Tensor | None  # (width,) float32, of the filters


@dataclass(frozen=True, slots=True)
class GatedDeltaWeights:
    inputs: list[LinearPart]  # rows of queries, keys and values; gates; shares; decays
    output: LinearPart
    filters: Tensor  # (channels, taps) float32
    rates: Tensor  # (num_value_heads,) float32
    decay_bias: Tensor  # (num_value_heads,) float32
    norm: Norm


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    inputs: list[LinearPart]  # rows of gates; values, keys and queries; steps
    output: LinearPart
    filters: Tensor  # (channels, taps) float32
    filter_bias: Tensor | None  # (channels,) float32
    step_bias: Tensor  # (num_heads,) float32
    rates: Tensor  # (num_heads,) float32
    skip: Tensor  # (num_heads,) float32
    norm: Norm  # of all heads side by side


MixerWeights: TypeAlias = (
    AttentionWeights | LatentWeights | ShortConvWeights | GatedDeltaWeights | Mamba2Weights
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """All weights of one layer; linears with one input are split as in the checkpoint."""

    mixer: MixerWeights | None
    mlp: MLPWeights | ExpertsWeights | None
    # Before the mixer, or before the MLP of a layer without one; None if there is none.
    first_norm: Norm | None
    mixer_post_norm: Norm | None
    mlp_norm: Norm | None  # between mixer and MLP; None if both share the first, or have none
    mlp_post_norm: Norm | None
    token_input: LayerInputWeights | None
    output_scale: float | None


@dataclass(frozen=True, slots=True)
class EndWeights:
    """Weights before the first layer and after the last.

    Attributes:
        embedding: (vocab_size, hidden_size); None if another process or model has it.
        head: likewise; the embedding itself if they are tied.
        head_bias: (vocab_size,) float32.
        positions: (count, hidden_size), from position 0 on.
        join: norms of embedding and hidden state, and the linear (hidden, 2 * hidden).
    """

    embedding: Weight | None
    head: Weight | None
    head_bias: Tensor | None
    final_norm: Norm | None
    positions: Weight | None
    token_input: TokenInputWeights | None
    join: tuple[Norm, Norm, Weight | None] | None
