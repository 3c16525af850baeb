"""Chooses each answer's number of drafts in a step. Imports no torch.

A draft is worth its probability of acceptance, and costs what one more row adds to the step. It
adds rows over all answers by falling probability while the step then yields more tokens a second. A
step without drafts is one of the choices, so it does not repeat a measured loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.speculation.acceptance import Acceptance
from appliance.engine.speculation.row_costs import RowCosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.engine.plan import StepLoad
    from appliance.engine.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal

MARGIN = 1.05  # required gain in tokens a second over a step without drafts


class Controller:
    """Learns acceptance and costs, and chooses."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.costs = RowCosts()

    def observe(self, load: StepLoad, seconds: float) -> None:
        if not load.prompt_rows:
            self.costs.observe(load.num_answers + load.draft_rows, seconds)

    def choose(
        self, proposals: Mapping[Sequence, Proposal], own_rows: int, num_answers: int, room: int
    ) -> dict[Sequence, int]:
        """Return the number of drafts to run, for sequences that get some.

        Args:
            proposals: for the next step.
            own_rows: rows of the step without drafts.
            num_answers: sequences in the step.
            room: drafts in all.
        """
        base = self.costs.seconds(own_rows)
        if not base:
            return {}
        candidates = [
            (survival, -place, sequence)
            for sequence, proposal in proposals.items()
            for place, survival in enumerate(self.acceptance.expected(sequence, proposal))
        ]
        candidates.sort(key=lambda one: one[:2], reverse=True)
        del candidates[max(0, room) :]
        tokens, best, count = float(num_answers), MARGIN * num_answers / base, 0
        for number, (survival, _, _) in enumerate(candidates, 1):
            tokens += survival
            rate = tokens / self.costs.seconds(own_rows + number)
            if rate > best:
                best, count = rate, number
        chosen: dict[Sequence, int] = {}
        for _, _, sequence in candidates[:count]:
            chosen[sequence] = chosen.get(sequence, 0) + 1
        return chosen
