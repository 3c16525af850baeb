"""The types of a step's operations, and the table that a backend fills with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from appliance.kernels.activation import Gating
    from appliance.kernels.adapters.factors import StackedFactors
    from appliance.kernels.cache.decoder_cache import AnyLayerCache
    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.cache.sealed_blocks import SealedBlocks
    from appliance.kernels.grouped_matmul.sorted_pairs import SortedPairs
    from appliance.kernels.grouped_matmul.weights import StackedExperts
    from appliance.kernels.library_tiles.tiles import LinearTiles
    from appliance.kernels.penalties.rows import Penalize
    from appliance.kernels.routing import Router
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.kernels.rows.state_spans import StateSpans
    from appliance.kernels.weights.weight import Weight


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each head before RoPE."""

    query: Tensor  # (head_dim,) float32
    key: Tensor  # (head_dim,) float32
    eps: float


class MaskTokens(Protocol):
    """Bans tokens without waiting for the device; see `token_mask.reference`."""

    def __call__(self, logits: Tensor, rows: Tensor, words: Tensor) -> None: ...


class TokenScores(NamedTuple):
    """Natural log probabilities; NaN in a row whose logits are not finite."""

    chosen: Tensor  # (num_rows,) float32, of the given token
    top: Tensor  # (num_rows, count) float32, of the likeliest, in falling order
    top_ids: Tensor  # (num_rows, count) int64; among equals the lowest id comes first


class ScoreTokens(Protocol):
    """Scores a token per row without waiting for the device."""

    def __call__(self, logits: Tensor, targets: Tensor, count: int) -> TokenScores:
        """Score tokens.

        Args:
            logits: (num_rows, vocab_size) float32; not changed.
            targets: (num_rows,) int64, a token for each row.
            count: likeliest tokens to report; 0 reports none.
        """
        ...


class Linear(Protocol):
    """A weight in one backend's layout: x (num_tokens, in) -> (num_tokens, out), dtype of x."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply: (num_tokens, in_features) -> (num_tokens, out_features)."""
        ...


class RowTable(Linear, Protocol):
    """A linear whose rows can be looked up: an embedding, and a head that is tied to it."""

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up: (num_rows,) integers -> (num_rows, in_features) in `dtype`."""
        ...


class ChosenExperts(NamedTuple):
    """The experts that a router chose for each token."""

    ids: Tensor  # (num_tokens, top_k) int64, 0 is the first expert that is here
    weights: Tensor  # (num_tokens, top_k) float32
    pairs: SortedPairs | None = None  # the same sorted by expert, if the backend needs that


class Route(Protocol):
    """Chooses the experts of each token, without waiting for the device."""

    def __call__(
        self,
        logits: Tensor,  # (num_tokens, num_experts) float32
        router: Router,
        held: range,
        selection_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> ChosenExperts:
        """Choose; the arguments are described at `expert_routing.reference`."""
        ...


class Shared(NamedTuple):
    """Output of the MLP that all tokens pass through, to be added to the experts' sum."""

    rows: Tensor  # (num_tokens, hidden_size), in the type of activations
    gate: Tensor | None  # (num_tokens, 1) float32, the logit of a factor of each row


class RoutedMLPs(Protocol):
    """The MLPs of one layer that a router chooses from, as one operation."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weights and biases take."""
        ...

    @property
    def weighs_inputs(self) -> bool:
        """True if the weights of a choice multiply what experts read; see `StackedExperts`."""
        ...

    def __call__(
        self,
        hidden: Tensor,  # (num_tokens, hidden_size)
        choice: ChosenExperts,
        shared: Shared | None = None,
    ) -> Tensor:  # (num_tokens, hidden_size), dtype of hidden
        """Sum each token's weighted expert outputs and what is shared, in float32.

        The host does not wait for the device. Of a part of the experts, other numbers add nothing;
        see `StackedExperts`.
        """
        ...


class GatedDeltaRule(Protocol):
    """Corrects a sequence's state by each row and reads it."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_key_heads, key_dim) float32
        key: Tensor,
        value: Tensor,  # (num_tokens, num_value_heads, value_dim) float32
        log_decay: Tensor,  # (num_tokens, num_value_heads) float32
        beta: Tensor,
        state: Tensor,  # (num_slots, num_value_heads, key_dim, value_dim) float32, updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, num_value_heads, value_dim) float32
        """Run the rule; the arguments are described at `recurrence.reference`."""
        ...


class SelectiveScan(Protocol):
    """Decays a sequence's state by each row, adds to it and reads it."""

    def __call__(
        self,
        value: Tensor,  # (num_tokens, num_heads, head_dim) float32
        key: Tensor,  # (num_tokens, num_groups, state_dim) float32
        query: Tensor,
        size: Tensor,  # (num_tokens, num_heads) float32
        rates: Tensor,  # (num_heads,) float32
        state: Tensor,  # (num_slots, num_heads, state_dim, head_dim) float32, updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, num_heads, head_dim) float32
        """Scan; the arguments are described at `recurrence.reference`."""
        ...


class ShortConvolution(Protocol):
    """Convolves each channel of a sequence over its latest rows, and keeps those."""

    def __call__(
        self,
        x: Tensor,  # (num_tokens, width)
        filters: Tensor,  # (width, taps) float32
        bias: Tensor | None,  # (width,) float32
        state: Tensor,  # (num_slots, taps - 1, width) float32, updated
        spans: StateSpans,
    ) -> Tensor:  # (num_tokens, width) float32
        """Convolve; the arguments are described at `short_conv.reference`."""
        ...


class PagedAttention(Protocol):
    """Attends from every row to its own sequence's blocks."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, head_dim)
        cache: AnyLayerCache,  # this step's keys and values are already written
        work: object,  # what this backend's plan_attention returned for the step
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # (num_tokens, num_heads, head_dim), dtype of query
        """Attend; see `attention.reference` for the arguments."""
        ...


class AttentionOverLatents(Protocol):
    """Attends from every row to the latents of its own sequence."""

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, width)
        cache: AnyLayerCache,  # this step's tokens are already written
        work: object,  # what this backend's plan_attention returned for the step
        *,
        scale: float,
        latent: int,
    ) -> Tensor:  # (num_tokens, num_heads, latent), dtype of query
        """Attend; see `latent_attention.reference` for the arguments."""
        ...


class RotateAndWrite(Protocol):
    """Brings a step's queries and keys into their final form, and writes keys and values."""

    def __call__(
        self,
        qkv: Tensor,  # (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
        cos: Tensor,  # (num_tokens, rotary_dim / 2) float32
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,  # (num_tokens,) int64
        norms: HeadNorms | None = None,
    ) -> Tensor:  # queries, (num_tokens, num_heads, head_dim)
        """Norm, rotate and write; see `kv_write.reference.rotate_and_write_with`."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations of a step: of the decoder, and of what follows on its logits."""

    name: str
    # weight (out, in) in any form, bias (out,) or None, activation dtype -> Linear
    prepare_linear: Callable[[Weight, Tensor | None, torch.dtype], Linear]
    # x (num_tokens, dim), weight (dim,) float32, eps -> (num_tokens, dim)
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    # x, residual, weight, eps -> (rms_norm(x + residual), x + residual)
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # x (num_tokens, heads, head_dim), cos and sin (num_tokens, rotary_dim / 2) float32 -> like x
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    # gate and up side by side (num_tokens, 2 * intermediate) -> (num_tokens, intermediate)
    gated_activation: Callable[[Tensor, Gating], Tensor]
    # logits (num_rows, vocab_size), cap -> float32
    soft_cap: Callable[[Tensor, float], Tensor]
    penalize: Penalize
    mask_tokens: MaskTokens
    score_tokens: ScoreTokens
    # key, value (num_tokens, num_kv_heads, head_dim), cache, slot_mapping (num_tokens,)
    write_kv: Callable[[Tensor, Tensor, LayerCache, Tensor], None]
    rotate_and_write: RotateAndWrite
    # cache, (n, 2) int64: full open blocks, and the blocks to seal them into
    seal_kv: Callable[[SealedBlocks, Tensor], None]
    # format, num_blocks, block_size, num_kv_heads, head_dim, device -> one layer's cache
    allocate_cache: Callable[..., LayerCache]
    # once per step, shared by all layers; the second argument is the block size
    plan_attention: Callable[[RaggedBatch, int], object]
    paged_attention: PagedAttention
    latent_attention: AttentionOverLatents
    gated_delta: GatedDeltaRule
    selective_scan: SelectiveScan
    short_conv: ShortConvolution
    # x (num_tokens, hidden_size), weight (num_outputs, hidden_size) float32, bias -> float32
    router_logits: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    route: Route
    # slots of the rows (num_tokens,) int32, number of slots -> once per step, for all layers
    plan_adapters: Callable[[Tensor, int], Any]
    # outputs, added to in place; inputs; factors of the place; what plan_adapters returned
    add_adapters: Callable[[Tensor, Tensor, StackedFactors, Any], None]
    # weight (gate over up, in), bias, activation dtype, activation -> act(x @ gate) * (x @ up) as
    # one operation, or None if there is none for such a weight
    prepare_gated: Callable[[Weight, Tensor | None, torch.dtype, Gating], Linear | None]
    # weight (rows, width), dtype of rows -> what looks them up, or None if torch does
    prepare_table: Callable[[Weight, torch.dtype], RowTable | None]
    # a weight as the CPU library holds it, on the device; dtype -> (out_features, in_features)
    widen_tiles: Callable[[LinearTiles, torch.dtype], Tensor]
    # all experts of a layer, activation dtype -> one operation, or None if none covers such
    # weights: then experts run one after another
    prepare_experts: Callable[[StackedExperts, torch.dtype], RoutedMLPs | None] | None = None
