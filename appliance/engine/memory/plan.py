"""Divides memory between weights, KV cache, states, workspace and the process before loading.

Refuses a plan that does not fit, with the numbers and the nearest settings that would. Imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.memory.experts.split import NONE_ON_HOST, settle, with_on_host
from appliance.engine.memory.refusal import refusal
from appliance.engine.memory.states import NO_STATES, StateMemory, needed_states, planned_states
from appliance.engine.memory.workspace import workspace_bytes
from appliance.errors import ConfigError, MemoryPlanError
from appliance.wording import as_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.memory.experts.split import ExpertChoice, ExpertsOnHost
    from appliance.model.spec import DecoderSpec

# On a CPU, where other programs need memory too, the default cache holds this many whole contexts,
# enough for a home; on a GPU it uses all that is left.
DEFAULT_CONTEXTS = 4
# Host memory for evicted blocks: a share of what is left, and its maximum. If the cache itself is
# in host memory, only preempted sequences and read-ahead need some.
_SHARE_BESIDE_CPU, _MOST_BESIDE_CPU = 16, 1 << 30
_SHARE_BESIDE_GPU, _MOST_BESIDE_GPU = 8, 4 << 30


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
    state_bytes: int = 0  # of a sequence's recurrent state, all layers
    kv_host_memory: int | None = None  # requested bytes, or None
    host_budget_bytes: int | None = None  # beside a GPU; None if the cache is in host memory
    process_bytes: int = 0  # part of the budget in use before a model is loaded
    prefix_caching: bool = True
    state_checkpoint_memory: int | None = None  # requested bytes, or None
    adapter_bytes: int = 0  # all slots, and one adapter being read
    draft_bytes: int = 0  # the drafter's, without its part of the cache
    experts: ExpertChoice | None = None  # undecided; included in `weight_bytes`
    host_experts: ExpertsOnHost = NONE_ON_HOST  # decided; besides `weight_bytes`
    # Bits of --weight-bits that would save something, and the weights' bytes with them.
    rounded: Callable[[], Iterable[tuple[int, int]]] = tuple

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
