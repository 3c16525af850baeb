"""Divides memory between weights, KV cache, states, workspace and the process before loading.

Refuses a plan that does not fit, with the numbers and the nearest settings that would. Imports no
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.memory.experts.split import NONE_ON_HOST, settle, with_on_host
from appliance.engine.nouns.limits import LOGIT_ROWS, SAMPLE_ROWS
from appliance.errors import ConfigError, MemoryPlanError
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec
from appliance.wording import as_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.memory.experts.split import ExpertChoice, ExpertsOnHost
    from appliance.model.spec import DecoderSpec, MLPSpec


# On a CPU, where other programs need memory too, the default cache holds this many whole contexts,
# enough for a home; on a GPU it uses all that is left.
DEFAULT_CONTEXTS = 4
# Host memory for evicted blocks: a share of what is left, and its maximum. If the cache itself is
# in host memory, only preempted sequences and read-ahead need some.
_SHARE_BESIDE_CPU, _MOST_BESIDE_CPU = 16, 1 << 30
_SHARE_BESIDE_GPU, _MOST_BESIDE_GPU = 8, 4 << 30
# By default a running sequence has room for checkpoints at the ends of its prompt and answer and of
# two older turns; all checkpoints together take a share of the memory for keys and values.
CHECKPOINTS_PER_SLOT = 4
_SHARE_OF_CACHE = 4  # one in this many


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Rows of recurrent state; all 0 without recurrent layers."""

    row_bytes: int = 0
    num_slots: int = 0
    num_checkpoints: int = 0

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * (self.num_slots + self.num_checkpoints)


NO_STATES = StateMemory()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of memory, in bytes unless noted."""

    num_blocks: int
    block_size: int  # token slots
    context_length: int  # tokens
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int  # for this process
    process_bytes: int = 0  # part of the budget in use without a model
    kv_host_bytes: int = 0  # host memory for evicted blocks
    host_is_short: bool = False  # less than usual, and less than one context
    states: StateMemory = NO_STATES
    adapter_bytes: int = 0  # all slots, and one adapter being read
    draft_bytes: int = 0  # the drafter's, without its part of the cache
    picture_bytes: int = 0  # the vision tower's, with its workspace and the rows kept
    host_experts: ExpertsOnHost = NONE_ON_HOST  # besides `weight_bytes`


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
    open_bytes: int = 0  # of open blocks, for sealed layers
    scratch_bytes: int = 0  # of packed weights that a GPU makes dense, a slice at a time
    state_bytes: int = 0  # of a sequence's recurrent state, all layers
    narrow_state_bytes: int = 0  # the same in 16 bits, if it is wider and could be
    kv_host_memory: int | None = None  # requested bytes, or None
    host_budget_bytes: int | None = None  # beside a GPU; None if the cache is in host memory
    process_bytes: int = 0  # part of the budget in use before a model is loaded
    prefix_caching: bool = True
    state_checkpoint_memory: int | None = None  # requested bytes, or None
    adapter_bytes: int = 0  # all slots, and one adapter being read
    draft_bytes: int = 0  # the drafter's, without its part of the cache
    picture_bytes: int = 0  # the vision tower's, with its workspace and the rows kept
    experts: ExpertChoice | None = None  # undecided; included in `weight_bytes`
    host_experts: ExpertsOnHost = NONE_ON_HOST  # decided; besides `weight_bytes`
    # Settings that round weights and would save something, and the weights' bytes with them.
    rounded: Callable[[], Iterable[tuple[str, int]]] = tuple

    @property
    def host_share(self) -> int:
        """The requested host memory, if it is part of the cache's budget."""
        return (self.kv_host_memory or 0) if self.host_budget_bytes is None else 0


def plan_memory(request: MemoryRequest) -> MemoryPlan:
    """Divide the budget.

    Raises:
        ConfigError: the requested context exceeds the model's.
        MemoryPlanError: one whole context does not fit after the weights, or host memory is less
            than requested.
    """
    return _divide(settle_experts(request))


def settle_experts(request: MemoryRequest) -> MemoryRequest:
    """Decide which layers' experts stay in host memory; raises as `plan_memory`."""
    return settle(request, _divide)


def settled_by_estimate(request: MemoryRequest) -> MemoryRequest:
    """Decide the same before the workspace is measured; the estimate is rarely too low.

    If even all experts in host memory do not suffice by the estimate, they may by measurement.
    """
    try:
        return settle_experts(request)
    except MemoryPlanError:
        choice = request.experts
        if choice is None:
            return request
        return with_on_host(request, len(choice.layers) if choice.asked is None else choice.asked)


def _divide(request: MemoryRequest) -> MemoryPlan:
    context = request.max_model_len or request.spec.context_length
    if context > request.spec.context_length:
        raise ConfigError(
            f"max_model_len is {context:,} but this model was made for "
            f"{request.spec.context_length:,} tokens; ask for that or less"
        )
    workspace = workspace_bytes(request)
    block_bytes = request.kv_bytes_per_token * request.block_size
    taken = request.process_bytes + request.weight_bytes + workspace + request.host_share
    taken += needed_states(request).num_bytes + request.adapter_bytes + request.draft_bytes
    taken += request.picture_bytes
    _check_host_experts(request)
    if request.host_budget_bytes is None:
        taken += request.host_experts.num_bytes
    for_kv = request.budget_bytes - taken
    least = -(-context // request.block_size)
    sure = max(least * block_bytes, request.kv_cache_memory or 0)
    states = planned_states(request, for_kv - sure)
    for_kv -= states.num_bytes - needed_states(request).num_bytes
    if request.kv_cache_memory is not None:
        num_blocks = request.kv_cache_memory // block_bytes
    elif request.fill and request.spec.own_cache is None:
        num_blocks = max(for_kv // block_bytes, 0)
    else:
        num_blocks = max(min(for_kv // block_bytes, DEFAULT_CONTEXTS * least), 0)
    if num_blocks < least or num_blocks * block_bytes > for_kv:
        raise MemoryPlanError(refusal(request, context, workspace, for_kv))
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
        picture_bytes=request.picture_bytes,
        host_experts=request.host_experts,
    )


def _check_host_experts(request: MemoryRequest) -> None:
    """Refuse experts that exceed the host memory beside a GPU; the budget excludes them."""
    on_host, left = request.host_experts, request.host_budget_bytes
    if not on_host.layers or left is None or left >= 0:
        return
    raise MemoryPlanError(
        f"this does not fit: the experts of {len(on_host.layers)} layers (--experts-on-cpu) need"
        f" {as_size(on_host.num_bytes)} of host memory and"
        f" {as_size(max(left + on_host.num_bytes, 0))} may be used"
    )


def _host_bytes(request: MemoryRequest, left: int) -> tuple[int, int]:
    """Return the host memory for evicted blocks, and the usual amount.

    Args:
        left: unused bytes of the budget, before requested host memory.
    """
    asked, budget = request.kv_host_memory, request.host_budget_bytes
    if asked is None:
        if budget is None:
            return min(left // _SHARE_BESIDE_CPU, _MOST_BESIDE_CPU), _MOST_BESIDE_CPU
        return min(max(budget, 0) // _SHARE_BESIDE_GPU, _MOST_BESIDE_GPU), _MOST_BESIDE_GPU
    if budget is not None and asked > budget:
        raise MemoryPlanError(
            f"this does not fit: --kv-host-memory asks for {as_size(asked)} of host memory and"
            f" {as_size(max(budget, 0))} may be used. Nearest settings: --kv-host-memory"
            f" {max(budget, 0) >> 20}MiB, or 0 to compute again what has to make room"
        )
    return asked, 0


def needed_states(request: MemoryRequest) -> StateMemory:
    """Return the configured rows; no checkpoints by default."""
    row_bytes = request.state_bytes
    if not row_bytes:
        return NO_STATES
    asked = (request.state_checkpoint_memory or 0) if request.prefix_caching else 0
    return StateMemory(row_bytes, request.max_num_seqs, asked // row_bytes)


def planned_states(request: MemoryRequest, left: int) -> StateMemory:
    """Return the rows to allocate.

    Args:
        left: bytes left after the needed rows and the smallest KV cache.
    """
    needed = needed_states(request)
    is_planned = request.state_checkpoint_memory is None and request.prefix_caching
    if not (needed.row_bytes and is_planned):
        return needed
    most = left // _SHARE_OF_CACHE // needed.row_bytes
    count = min(CHECKPOINTS_PER_SLOT * needed.num_slots, max(most, 0))
    return StateMemory(needed.row_bytes, needed.num_slots, count)


def workspace_bytes(request: MemoryRequest) -> int:
    """Return the largest step's bytes, without weights and cache.

    Measured or estimated; includes open blocks, which are transient. What streams of experts take
    is in a measure, and with the weights, already.

    The estimate sums the widest layer's activations for every row (residual, normed, q/k/v,
    attention output, gate and up, their product), hidden states for the head, twice if prompts are
    read, and float32 logits: with the three copies of sampling, twice because steps of different
    sizes fragment the allocator, or with the four copies of scoring a chunk of a prompt. On a GPU
    attention of rows that decode has partial results, packed weights are made dense for many rows,
    and chunks of prompts pass through gathered states.
    """
    if request.workspace_bytes is not None:
        return request.workspace_bytes + request.open_bytes
    spec = request.spec
    widest = max(
        4 * spec.hidden_size
        + (0 if layer.mixer is None else layer.mixer.row_floats)
        + _mlp_width(layer.mlp, spec.hidden_size)
        for layer in spec.layers
    )
    rows = request.max_num_batched_tokens
    beside = request.open_bytes + request.host_experts.stream_bytes
    hidden = 2 * spec.hidden_size * request.activation_bytes
    logits = max(request.max_num_seqs * 8, LOGIT_ROWS * 5) * spec.vocab_size * 4
    if spec.own_cache is not None:
        beside += spec.own_cache.most_taken(request.max_model_len or spec.context_length)
    elif request.host_budget_bytes is not None:
        beside += _partial_bytes(request) + request.scratch_bytes + _gathered_bytes(request)
    return rows * (widest * request.activation_bytes + hidden) + logits + beside


def _partial_bytes(request: MemoryRequest) -> int:
    """Return the most bytes of one layer's partial results of decode, see `attention.work`.

    Each row has its own results of a block that several share, so they follow from rows and
    context, not from the size of the cache.
    """
    from appliance.kernels.attention.work import MAX_ROWS, most_partials  # loads NumPy

    context = request.max_model_len or request.spec.context_length
    rows = max(request.max_num_seqs, SAMPLE_ROWS)  # with drafts
    if request.open_bytes:  # two rows of an answer may be in two blocks, as two sequences
        rows = max(rows, 2 * request.max_num_seqs)
    rows = min(rows, request.max_num_batched_tokens)
    floats = 0
    for layer in request.spec.layers:
        match layer.mixer:
            case AttentionSpec(num_heads=heads, head_dim=width, window=window):
                partials = most_partials(rows, context, MAX_ROWS, window)
            case LatentAttentionSpec(num_heads=heads, latent=width):
                partials = most_partials(rows, context, MAX_ROWS)
            case _:
                continue
        floats = max(floats, partials * heads * (width + 1))
    return 4 * floats


def _gathered_bytes(request: MemoryRequest) -> int:
    """Return the bytes of one recurrent layer's states of a step with prompts, in float32."""
    mixers = request.spec.recurrent_layers.values()
    largest = max((math.prod(mixer.state[-1]) for mixer in mixers), default=0)
    return 4 * largest * request.max_num_seqs


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


def refusal(request: MemoryRequest, context: int, workspace: int, for_kv: int) -> str:
    """Return the numbers of a plan that does not fit, and the nearest settings that would.

    Args:
        context: tokens.
        workspace: bytes.
        for_kv: bytes left for the KV cache; negative if the rest does not fit.
    """
    needed = context * request.kv_bytes_per_token
    host = request.host_share
    swapped = f" and {as_size(host)} for blocks that make room (--kv-host-memory)" if host else ""
    asked = request.kv_cache_memory
    wish = "" if asked is None else f"--kv-cache-memory asks for {as_size(asked)}; "
    itself = f", {as_size(own)} of Python and libraries" if (own := request.process_bytes) else ""
    states = needed_states(request)
    rows = f" for {states.num_slots} sequences (--max-num-seqs)"
    rows += f" and {states.num_checkpoints} checkpoints" if states.num_checkpoints else ""
    recurrent = (
        f", {as_size(states.num_bytes)} of recurrent states{rows}" if states.num_bytes else ""
    )
    slots = request.adapter_bytes
    adapters = f", {as_size(slots)} of adapters (--max-loras, --max-lora-rank)" if slots else ""
    draft = f", {as_size(own)} of what drafts" if (own := request.draft_bytes) else ""
    tower = f", {as_size(own)} of what reads pictures" if (own := request.picture_bytes) else ""
    on_host = len(request.host_experts.layers)
    experts = f" without the experts of {on_host} layers" if on_host else ""
    numbers = (
        f"{wish}one context of {context:,} tokens needs {as_size(needed)} of KV cache"
        f" ({request.kv_format})"
        f" beside {as_size(request.weight_bytes)} of weights{experts}{itself}{recurrent}{adapters}"
        f"{draft}{tower} and {as_size(workspace)} of"
        f" workspace{swapped}; {as_size(request.budget_bytes)} may be used"
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
        narrow = request.narrow_state_bytes
        if narrow and over <= states.num_slots * (states.row_bytes - narrow):
            advice.append("--mamba-cache-dtype fp16 would fit")
    if slots and wanted - for_kv <= slots:
        advice.append("a smaller --max-loras or --max-lora-rank would fit")
    if request.draft_bytes and wanted - for_kv <= request.draft_bytes:
        advice.append("--speculate auto, without what drafts, would fit")
    if request.picture_bytes and wanted - for_kv <= request.picture_bytes:
        advice.append("--image-tokens :256, or --no-images for texts alone, may fit")
    if asked is not None and needed <= for_kv:
        too_much = asked > for_kv
        size = for_kv // 2**20 if too_much else -(-needed // 2**20)
        advice.append(f"--kv-cache-memory {size}MiB is the {'most' if too_much else 'least'}")
    if 16 <= tokens < context:
        step = 1024 if tokens >= 4096 else request.block_size
        advice.append(f"--max-model-len {tokens // step * step} would fit")
        if request.kv_format != "int8" and 0.53 * needed <= usable:
            advice.append("--kv-cache-dtype int8 would fit")
    if not on_host:
        # Neither of a split's sides is what these bytes are of.
        missing = wanted - for_kv
        found = (
            setting for setting, size in request.rounded() if request.weight_bytes - size >= missing
        )
        if (setting := next(found, None)) is not None:
            advice.append(f"{setting} would fit")
    if not advice:
        advice.append("quantize the weights to 4 bits (appliance quantize) or take a smaller model")
    return f"this does not fit: {numbers}. Nearest settings: {'; '.join(advice)}"
