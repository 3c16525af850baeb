"""Negotiates memory for a model that shares a device with others. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.engine.memory.plan import MemoryPlan, plan_memory, workspace_bytes

if TYPE_CHECKING:
    from appliance.engine.memory.plan import MemoryRequest


@dataclass(frozen=True, slots=True)
class Admission:
    """A model's memory among others.

    Attributes:
        limit: bytes of all models together; None means the device's free memory.
        is_shared: other models may load too, so do not fill a GPU with KV blocks.
        ask: called with needed and available bytes before taking memory; returns once other models
            have made room, or cannot.
    """

    limit: int | None = None
    is_shared: bool = False
    ask: Callable[[int, int], object] = lambda needed, free: None

    def plan(self, make_request: Callable[[], MemoryRequest], *, measured: bool) -> MemoryRequest:
        """Plan a model's memory, asking others to make room.

        Args:
            make_request: builds the request from the memory that is free now.
            measured: the workspace is measured after loading, so refuse only a model that cannot
                fit.

        Returns:
            The request to plan with, after others have made room.

        Raises:
            MemoryPlanError: the model would not fit even alone.
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
    """Return the bytes of a plan in the memory that it divides."""
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
        + plan.picture_bytes
        + host_bytes
    )
