"""Estimates the largest step's memory, without weights and cache. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.limits import LOGIT_ROWS
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.spec import ExpertsSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from appliance.engine.memory.plan import MemoryRequest
    from appliance.model.spec import MixerSpec, MLPSpec


def workspace_bytes(request: MemoryRequest) -> int:
    """Return the largest step's bytes, without weights and cache.

    Measured or estimated; includes open blocks, which are transient. What streams of experts take
    is in a measure, and with the weights, already.

    The estimate sums the widest layer's activations for every row (residual, normed, q/k/v,
    attention output, gate and up, their product), hidden states for the head, twice if prompts are
    read, and float32 logits: with the three copies of sampling, twice because steps of different
    sizes fragment the allocator, or with the four copies of scoring a chunk of a prompt.
    """
    if request.workspace_bytes is not None:
        return request.workspace_bytes + request.open_bytes
    spec = request.spec
    widest = max(
        4 * spec.hidden_size + _mixer_width(layer.mixer) + _mlp_width(layer.mlp, spec.hidden_size)
        for layer in spec.layers
    )
    rows = request.max_num_batched_tokens
    beside = request.open_bytes + request.host_experts.stream_bytes
    hidden = 2 * spec.hidden_size * request.activation_bytes
    logits = max(request.max_num_seqs * 8, LOGIT_ROWS * 5) * spec.vocab_size * 4
    if spec.own_cache is not None:
        beside += spec.own_cache.most_taken(request.max_model_len or spec.context_length)
    return rows * (widest * request.activation_bytes + hidden) + logits + beside


def _mixer_width(mixer: MixerSpec | None) -> int:
    """Return a row's floats in a mixer: outputs of its linears and of its operation."""
    if mixer is None:
        return 0
    if isinstance(mixer, Mamba2Spec):
        return 3 * mixer.inputs
    if isinstance(mixer, LatentAttentionSpec):
        heads = mixer.query_dim + 2 * mixer.width + mixer.latent + mixer.value_dim
        return mixer.num_heads * heads + (mixer.query_rank or 0) + 2 * mixer.width
    if isinstance(mixer, ShortConvSpec):
        return 5 * mixer.width
    if isinstance(mixer, GatedDeltaSpec):
        return 3 * (mixer.channels + mixer.values)
    return (mixer.num_heads * 2 + mixer.num_kv_heads * 2) * mixer.head_dim


def _mlp_width(mlp: MLPSpec | ExpertsSpec | None, hidden_size: int) -> int:
    """Return a row's floats in an MLP, or in its chosen and shared experts."""
    if mlp is None:
        return 0
    if not isinstance(mlp, ExpertsSpec):
        return 3 * mlp.intermediate_size
    shared = 0 if mlp.shared is None else 3 * mlp.shared.intermediate_size
    width = mlp.latent or hidden_size
    chosen = mlp.router.top_k * (3 * mlp.intermediate_size + 2 * width)
    return chosen + shared + 2 * (mlp.latent or 0) + 2 * mlp.router.num_experts
