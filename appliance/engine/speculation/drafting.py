"""Asks a proposer that takes time, as far as that pays. Imports no torch.

Its drafts are as long as yields the most tokens a second, the time to make them included. Where
none pays, it is tried now and then, for a share of the time of steps: so a proposer that never
comes true costs no more than that share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.speculation.controller import MARGIN

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.sequence import Sequence
    from appliance.engine.speculation.controller import Controller
    from appliance.engine.speculation.proposal import Proposal, SlowProposer

TRIAL_SHARE = 0.01  # of the time of steps, for trials
_TRIAL_TOKENS = 4
_FIRST_CREDIT, _MOST_CREDIT = 0.1, 0.25  # seconds for trials at first, and saved up at most


class Drafting:
    """Decides how long the drafts of a slow proposer are.

    Args:
        proposer: makes them.
        controller: knows what steps cost, and what came true.
        most: tokens of a draft.
    """

    def __init__(self, proposer: SlowProposer, controller: Controller, most: int) -> None:
        self._proposer = proposer
        self._controller = controller
        self._most = most
        self._credit = _FIRST_CREDIT
        self._is_trial = False

    def propose(
        self,
        candidates: Ordered[tuple[Sequence, int, float]],
        own_rows: int,
        num_answers: int,
    ) -> dict[Sequence, Proposal]:
        """Return proposals for some sequences.

        Args:
            candidates: each with the most tokens of use, and the tokens that it may expect of
                another proposal.
            own_rows: rows of the step without drafts.
            num_answers: sequences in the step.
        """
        self._is_trial = False
        if not candidates or not self._controller.costs.seconds(own_rows):
            return {}
        chances = [self._chance(sequence) for sequence, *_ in candidates]
        pays, least = self._judge(chances, own_rows, num_answers)
        if not pays:
            return self._try(candidates)
        asked = [
            (sequence, min(most, self._most))
            for (sequence, most, other), chance in zip(candidates, chances, strict=True)
            if sum(chance**place for place in range(1, self._most + 1)) > other
        ]
        return self._ask(asked, least)

    def observe(self, step_seconds: float, own_seconds: float) -> None:
        """Learn the duration of a step, and of what was proposed for it."""
        saved = self._credit + TRIAL_SHARE * step_seconds
        self._credit = min(_MOST_CREDIT, saved) - (own_seconds if self._is_trial else 0.0)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._proposer.end(sequence)

    def _chance(self, sequence: Sequence) -> float:
        source = self._proposer.source(sequence)
        return self._controller.acceptance.typical(sequence, source)

    def _judge(
        self, chances: Ordered[float], own_rows: int, num_answers: int
    ) -> tuple[bool, float]:
        """Return True if drafts pay, and the chance from which on a draft gets one more token."""
        costs, count = self._controller.costs, len(chances)
        each, base = self._proposer.costs.seconds(count), costs.seconds(own_rows)
        if not each:
            return False, 1.0
        tokens, least = float(num_answers), MARGIN * num_answers / base
        survivals = [1.0] * count
        for rounds in range(1, self._most + 1):
            survivals = [left * chance for left, chance in zip(survivals, chances, strict=True)]
            tokens += sum(survivals)
            seconds = costs.seconds(own_rows + rounds * count) + rounds * each
            if tokens / seconds > least:
                row = (each + costs.seconds(own_rows + count) - base) / count
                return True, row * num_answers / base
        return False, 1.0

    def _try(self, candidates: Ordered[tuple[Sequence, int, float]]) -> dict[Sequence, Proposal]:
        """Make a short draft of the sequence that has least to read, if there is time for it."""
        proposer = self._proposer
        free = {sequence: most for sequence, most, other in candidates if not other}
        if self._credit <= 0 or not free:
            return {}
        unread = {sequence: proposer.unread(sequence) for sequence in free}
        sequence = min(free, key=unread.__getitem__)
        needed = proposer.costs.seconds(1) * _TRIAL_TOKENS
        needed += proposer.read_seconds * unread[sequence]
        if needed > self._credit:
            return {}
        self._is_trial = True
        return self._ask([(sequence, min(free[sequence], _TRIAL_TOKENS))], 0.0)

    def _ask(self, asked: Ordered[tuple[Sequence, int]], least: float) -> dict[Sequence, Proposal]:
        if not asked:
            return {}
        return self._proposer.propose(asked, self._controller.acceptance.chance, least)
