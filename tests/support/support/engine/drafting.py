"""Engines that verify drafts whatever these cost, on machines of any speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.speculation.controller import RowCosts
from appliance.engine.speculation.draft_model import DraftModelProposer
from appliance.engine.speculation.speculator import Speculator

if TYPE_CHECKING:
    from appliance.engine.engine import LLMEngine


class FixedCosts(RowCosts):
    """Every step takes the same time."""

    def __init__(self, each: float) -> None:
        super().__init__()
        self._each = each

    def seconds(self, rows: int) -> float:
        return self._each


def draft_always(engine: LLMEngine) -> None:
    """Make rows and drafts cost next to nothing, so that all proposed drafts are verified.

    Prompts do not depend on how long steps take, either.
    """
    engine.clock = lambda: 0.0
    speculator = engine.scheduler.speculator
    if not isinstance(speculator, Speculator):
        return
    speculator.controller.costs = speculator.controller.ahead_costs = FixedCosts(1.0)
    speculator.clock = lambda: 0.0
    if speculator.drafting is not None:
        slow = speculator.drafting.proposer
        assert isinstance(slow, DraftModelProposer)
        slow.costs = FixedCosts(0.001)
        slow.clock = lambda: 0.0
