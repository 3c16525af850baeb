"""Divides memory between weights, KV cache, states, workspace and the process before loading.

A plan that does not fit is refused with the numbers and the nearest settings that would. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.limits import LOGIT_ROWS
from appliance.engine.state_memory import NO_STATES, StateMemory, needed_states, planned_states
from appliance.errors import ConfigError, MemoryPlanError
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from appliance.model.spec import ExpertsSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from appliance.model.spec import DecoderSpec, MixerSpec, MLPSpec

# On a CPU, whose memory other programs want too, a cache for this many whole contexts is enough for
# a home by default; on a GPU all that is left is used.
DEFAULT_CONTEXTS = 4
# Host memory for blocks that leave the cache: a share of what is left, and its maximum. Where the
# cache is host memory itself, only preempted sequences and read-ahead need some.
_SHARE_BESIDE_CPU, _MOST_BESIDE_CPU = 16, 1 << 30
_SHARE_BESIDE_GPU, _MOST_BESIDE_GPU = 8, 4 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of memory; bytes, except where said otherwise."""

    num_blocks: int
    block_size: int  # token slots
    context_length: int  # tokens
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int  # that this process may use
    process_bytes: int = 0  # of the budget, taken without a model
    kv_host_bytes: int = 0  # host memory for blocks that leave the cache
    host_is_short: bool = False  # less than usual, and less than one context
    states: StateMemory = NO_STATES
    adapter_bytes: int = 0  # of all slots, and of one adapter that is being read
    draft_bytes: int = 0  # of a draft model, without its part of the cache


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """The memory that must fit, and the budget."""

    spec: DecoderSpec
    weight_bytes: int
    kv_bytes_per_token: int  # all layers
    kv_format: str
    block_size: int
    activation_bytes: int  # per element
    budget_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None  # tokens; None means the model's own context
    kv_cache_memory: int | None  # requested bytes, or None
    fill: bool  # use all remaining memory for the KV cache
    workspace_bytes: int | None = None  # measured; None estimates it
    open_bytes: int = 0  # of open blocks, for sealed blocks
    kv_host_memory: int | None = None  # requested bytes, or None
    host_budget_bytes: int | None = None  # beside a GPU; None if the cache is host memory itself
    process_bytes: int = 0  # of the budget, taken before a model is loaded
    prefix_caching: bool = True
    state_checkpoint_memory: int | None = None  # requested bytes, or None
    adapter_bytes: int = 0  # of all slots, and of one adapter that is being read
    draft_bytes: int = 0  # of a draft model, without its part of the cache
    state_copies: int = 1  # of a recurrent state, which every rank keeps whole


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Divide the budget.

    Raises:
        ConfigError: the requested context is longer than the model's.
        MemoryPlanError: one whole context does not fit beside the weights, or there is less host
            memory than requested.
    """
    context = request.max_model_len or request.spec.context_length
    if context > request.spec.context_length:
        raise ConfigError(
            f"max_model_len is {context:,} but this model was made for "
            f"{request.spec.context_length:,} tokens; ask for that or less"
        )
    workspace = workspace_bytes(request)
    block_bytes = request.kv_bytes_per_token * request.block_size
    taken = request.process_bytes + request.weight_bytes + workspace + _host_share(request)
    taken += needed_states(request).num_bytes + request.adapter_bytes + request.draft_bytes
    for_kv = request.budget_bytes - taken
    least = -(-context // request.block_size)
    sure = max(least * block_bytes, request.kv_cache_memory or 0)
    states = planned_states(request, for_kv - sure)
    for_kv -= states.num_bytes - needed_states(request).num_bytes
    if request.kv_cache_memory is not None:
        num_blocks = request.kv_cache_memory // block_bytes
    elif request.fill:
        num_blocks = max(for_kv // block_bytes, 0)
    else:
        num_blocks = max(min(for_kv // block_bytes, DEFAULT_CONTEXTS * least), 0)
    if num_blocks < least or num_blocks * block_bytes > for_kv:
        raise MemoryPlanError(_refusal(request, context, workspace, for_kv))
    kv_bytes = num_blocks * block_bytes
    host_bytes, usual = _host_bytes(request, for_kv - kv_bytes)
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=request.block_size,
        context_length=context,
        weight_bytes=request.weight_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=workspace,
        budget_bytes=request.budget_bytes,
        process_bytes=request.process_bytes,
        kv_host_bytes=host_bytes,
        host_is_short=host_bytes < min(usual, least * block_bytes),
        states=states,
        adapter_bytes=request.adapter_bytes,
        draft_bytes=request.draft_bytes,
    )


def _host_share(request: MemoryRequest) -> int:
    """Return the requested host memory, if it comes out of the cache's own budget."""
    return (request.kv_host_memory or 0) if request.host_budget_bytes is None else 0


def _host_bytes(request: MemoryRequest, left: int) -> tuple[int, int]:
    """Return the host memory for blocks that leave the cache, and the usual amount.

    Args:
        request: the memory that must fit.
        left: bytes of the budget that nothing else takes, before requested host memory.
    """
    asked, budget = request.kv_host_memory, request.host_budget_bytes
    if asked is None:
        if budget is None:
            return min(left // _SHARE_BESIDE_CPU, _MOST_BESIDE_CPU), _MOST_BESIDE_CPU
        return min(max(budget, 0) // _SHARE_BESIDE_GPU, _MOST_BESIDE_GPU), _MOST_BESIDE_GPU
    if budget is not None and asked > budget:
        raise MemoryPlanError(
            f"this does not fit: --kv-host-memory asks for {_size(asked)} of host memory and"
            f" {_size(max(budget, 0))} may be used. Nearest settings: --kv-host-memory"
            f" {max(budget, 0) >> 20}MiB, or 0 to compute again what has to make room"
        )
    return asked, 0


def workspace_bytes(request: MemoryRequest) -> int:
    """Return the bytes that the largest step needs beside weights and cache.

    This is measured or estimated, and includes open blocks, which are transient.

    The estimate: the widest layer's activations for every row (residual, normed, q/k/v, attention
    output, gate and up, their product), hidden states for the head, twice where prompts are read,
    and float32 logits with the three copies that sampling makes, or with the four that scores of
    a prompt take, one chunk at a time; as much again lies scattered in the allocator, since steps
    differ in their rows.
    """
    if request.workspace_bytes is not None:
        return request.workspace_bytes + request.open_bytes
    spec = request.spec
    widest = max(
        4 * spec.hidden_size + _mixer_width(layer.mixer) + _mlp_width(layer.mlp, spec.hidden_size)
        for layer in spec.layers
    )
    rows = request.max_num_batched_tokens
    hidden = 2 * spec.hidden_size * request.activation_bytes
    logits = max(request.max_num_seqs * 8, LOGIT_ROWS * 5) * spec.vocab_size * 4
    return rows * (widest * request.activation_bytes + hidden) + logits + request.open_bytes


def _mixer_width(mixer: MixerSpec | None) -> int:
    """Return the floats of a row in a mixer: what its linears yield, and what is made of it."""
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
    """Return the floats of a row in an MLP, or in the experts chosen for it and the shared one."""
    if mlp is None:
        return 0
    if not isinstance(mlp, ExpertsSpec):
        return 3 * mlp.intermediate_size
    shared = 0 if mlp.shared is None else 3 * mlp.shared.intermediate_size
    chosen = mlp.router.top_k * (3 * mlp.intermediate_size + 2 * hidden_size)
    return chosen + shared + 2 * mlp.router.num_experts


def _refusal(request: MemoryRequest, context: int, workspace: int, for_kv: int) -> str:
    needed = context * request.kv_bytes_per_token
    host = _host_share(request)
    swapped = f" and {_size(host)} for blocks that make room (--kv-host-memory)" if host else ""
    asked = request.kv_cache_memory
    wish = "" if asked is None else f"--kv-cache-memory asks for {_size(asked)}; "
    itself = f", {_size(own)} of Python and libraries" if (own := request.process_bytes) else ""
    states = needed_states(request)
    rows = f" for {states.num_slots} sequences (--max-num-seqs)"
    rows += f" and {states.num_checkpoints} checkpoints" if states.num_checkpoints else ""
    recurrent = f", {_size(states.num_bytes)} of recurrent states{rows}" if states.num_bytes else ""
    slots = request.adapter_bytes
    adapters = f", {_size(slots)} of adapters (--max-loras, --max-lora-rank)" if slots else ""
    draft = f", {_size(own)} of the draft model" if (own := request.draft_bytes) else ""
    numbers = (
        f"{wish}one context of {context:,} tokens needs {_size(needed)} of KV cache"
        f" ({request.kv_format})"
        f" beside {_size(request.weight_bytes)} of weights{itself}{recurrent}{adapters}{draft} and"
        f" {_size(workspace)} of"
        f" workspace{swapped}; {_size(request.budget_bytes)} may be used"
    )
    usable = for_kv if asked is None else min(for_kv, asked)
    tokens = max(usable, 0) // request.kv_bytes_per_token
    advice = []
    block_bytes = request.kv_bytes_per_token * request.block_size
    wanted = max(asked or 0, -(-context // request.block_size) * block_bytes)
    if host and 0 <= for_kv + host - wanted < host:
        advice.append(f"--kv-host-memory {(for_kv + host - wanted) >> 20}MiB would fit")
    if states.row_bytes and (over := wanted - for_kv) > 0:
        fewer = states.num_slots + over // -states.row_bytes
        if states.num_checkpoints * states.row_bytes >= over:
            size = states.num_checkpoints * states.row_bytes - over
            advice.append(f"--state-checkpoint-memory {size >> 20}MiB would fit")
        elif fewer > 0:
            advice.append(f"--max-num-seqs {fewer} would fit")
    if slots and wanted - for_kv <= slots:
        advice.append("a smaller --max-loras or --max-lora-rank would fit")
    if request.draft_bytes and wanted - for_kv <= request.draft_bytes:
        advice.append("--speculate auto, without a draft model, would fit")
    if asked is not None and needed <= for_kv:
        too_much = asked > for_kv
        size = for_kv // 2**20 if too_much else -(-needed // 2**20)
        advice.append(f"--kv-cache-memory {size}MiB is the {'most' if too_much else 'least'}")
    if 16 <= tokens < context:
        step = 1024 if tokens >= 4096 else request.block_size
        advice.append(f"--max-model-len {tokens // step * step} would fit")
        if request.kv_format != "int8" and 0.53 * needed <= usable:
            advice.append("--kv-cache-dtype int8 would fit")
    if not advice:
        advice.append("quantize the weights to 4 bits (appliance quantize) or take a smaller model")
    return f"this does not fit: {numbers}. Nearest settings: {'; '.join(advice)}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.1f} MiB"
