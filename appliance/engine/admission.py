"""The terms on which a model takes memory that others may want as well. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.engine.memory_plan import MemoryPlan, plan_memory
from appliance.engine.workspace import workspace_bytes

if TYPE_CHECKING:
    from appliance.engine.memory_plan import MemoryRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """The memory of a model among others.

    Attributes:
        limit: most bytes of all models together; None is what the device has free.
        is_shared: others may be loaded beside it, so a GPU's memory is not filled with KV blocks.
        ask: called before memory is taken, with the bytes that are needed and the bytes that may be
            used now; returns once others have made room, or cannot.
    """

    limit: int | None = None
    is_shared: bool = False
    ask: Callable[[int, int], object] = lambda needed, free: None

    def plan(self, make_request: Callable[[], MemoryRequest], *, measured: bool) -> MemoryRequest:
        """Ask for the memory that a model needs.

        Args:
            make_request: asks with the memory that is free at the moment.
            measured: the workspace is measured once the weights are loaded, so that only what
                cannot fit at all is refused here.

        Returns:
            The request to plan with, after others have made room.

        Raises:
            MemoryPlanError: the model does not fit, even if it were alone.
        """
        now = make_request()
        alone = self._bounded(now, self.limit or now.budget_bytes)
        first = plan_memory(replace(alone, workspace_bytes=0) if measured else alone)
        needed = total_bytes(first, alone)
        if measured:
            needed += workspace_bytes(alone)
        self.ask(needed, now.budget_bytes)
        later = make_request()
        return self._bounded(later, min(later.budget_bytes, self.limit or later.budget_bytes))

    def _bounded(self, request: MemoryRequest, budget_bytes: int) -> MemoryRequest:
        fill = request.fill and not self.is_shared
        return replace(request, budget_bytes=budget_bytes, fill=fill)


def total_bytes(plan: MemoryPlan, request: MemoryRequest) -> int:
    """Return the bytes of a plan that lie in the memory it divides."""
    host_bytes = 0
    if request.host_budget_bytes is None:
        host_bytes = plan.kv_host_bytes + plan.host_experts.num_bytes
    return (
        plan.process_bytes
        + plan.weight_bytes
        + plan.kv_bytes
        + plan.workspace_bytes
        + plan.states.num_bytes
        + plan.adapter_bytes
        + plan.draft_bytes
        + host_bytes
    )
