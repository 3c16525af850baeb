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
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.plan import StepLoad
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal

_MARGIN, _MARGIN_OF_SEVERAL = 1.05, 1.1
_CLEAR = 1.3  # gain from which on it does without a recent duration of a step without drafts
_RECENT = 24  # steps


def margin_of(num_answers: int) -> float:
    """Return the gain in tokens a second over a step without drafts that drafts must promise.

    Those chosen among several answers' are those overrated: of JSON at eight streams 82 % of the
    drafts' tokens were expected, and 72 % came true.
    """
    return _MARGIN if num_answers == 1 else _MARGIN_OF_SEVERAL


class Controller:
    """Learns acceptance and costs, and chooses.

    Attributes:
        costs: of steps planned with the results of the one before, as steps with drafts are.
        ahead_costs: of steps planned ahead; they hide the host's work, and hold no drafts.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.costs = RowCosts()
        self.ahead_costs = RowCosts()
        self._since_plain = 0  # steps with drafts since one without

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None:
        self._since_plain = self._since_plain + 1 if load.draft_rows else 0
        if not load.prompt_rows:
            costs = self.ahead_costs if is_ahead else self.costs
            costs.observe(load.num_answers + load.draft_rows, seconds)

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
        candidates = [
            (survival, -place, sequence)
            for sequence, proposal in proposals.items()
            for place, survival in enumerate(self.acceptance.expected(sequence, proposal))
        ]
        candidates.sort(key=lambda one: one[:2], reverse=True)
        del candidates[max(0, room) :]
        count = self._count([one[0] for one in candidates], own_rows, num_answers)
        chosen: dict[Sequence, int] = {}
        for _, _, sequence in candidates[:count]:
            chosen[sequence] = chosen.get(sequence, 0) + 1
        return chosen

    def awaits(
        self, proposals: Mapping[Sequence, Proposal], own_rows: int, num_answers: int, room: int
    ) -> bool:
        """Return True if drafts pay in the step after the one that samples each first token.

        Args:
            proposals: of that token and the next ones; see `choose` for the rest.
        """
        survivals = [
            survival
            for sequence, proposal in proposals.items()
            for survival in self.acceptance.expected(sequence, proposal)[1:]
        ]
        survivals.sort(reverse=True)
        return self._count(survivals[: max(0, room)], own_rows, num_answers) > 0

    def _count(self, survivals: Ordered[float], own_rows: int, num_answers: int) -> int:
        """Return the number of drafts with the most tokens a second, of falling probabilities."""
        costs = self.costs if self.costs.seconds(own_rows) else self.ahead_costs
        base = self.ahead_costs.seconds(own_rows) or costs.seconds(own_rows)
        if not base:
            return 0
        # Drafts that seem to pay would keep an old duration of a step without them from being
        # noticed; contexts grow, and machines change.
        margin = margin_of(num_answers) if self._since_plain < _RECENT else _CLEAR
        tokens, best, count = float(num_answers), margin * num_answers / base, 0
        for number, survival in enumerate(survivals, 1):
            tokens += survival
            rate = tokens / costs.seconds(own_rows + number)
            if rate > best:
                best, count = rate, number
        return count
