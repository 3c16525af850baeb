"""Asks a slow proposer, as far as that pays. Imports no torch.

Chooses the draft length with the most tokens a second, drafting time included. An account corrects
wrong estimates: each step adds a small share of its time and the time that accepted tokens have
saved, and pays for reading, drafting and the rows of drafts; nobody is asked while it is empty. So
a proposer costs at most that share. Steps of few and of many answers have separate accounts,
because drafting may pay in one only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.speculation.controller import margin_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.speculation.controller import Controller
    from appliance.engine.speculation.proposal import Proposal, SlowProposer

FREE_SHARE = 0.01  # of the time of steps
_TRIAL_TOKENS = 3
_FIRST_STEPS, _MOST_STEPS = 16, 48  # initial and maximum balance: the time of steps


class Drafting:
    """Decides the draft length of a slow proposer.

    Args:
        controller: knows steps' costs, and acceptance.
        most: tokens of a draft.

    Attributes:
        is_trial: run its last result to learn costs and acceptance.
    """

    def __init__(self, proposer: SlowProposer, controller: Controller, most: int) -> None:
        self._proposer = proposer
        self._controller = controller
        self._most = most
        self._accounts: dict[int, float] = {}  # seconds by step size
        self._own_rows = 0  # in the step being planned, without drafts
        self._num_answers = 0  # in that step
        self._has_asked = False  # for that step
        self.is_trial = False

    def propose(
        self,
        candidates: Ordered[tuple[Sequence, int, float]],
        own_rows: int,
        num_answers: int,
    ) -> dict[Sequence, Proposal]:
        """Return proposals for some sequences.

        Args:
            candidates: each with the maximum of useful tokens, and the tokens expected of another
                proposal.
            own_rows: rows of the step without drafts.
            num_answers: sequences in the step.
        """
        self.is_trial = self._has_asked = False
        self._own_rows, self._num_answers = own_rows, num_answers
        base = self._controller.costs.seconds(own_rows)
        if not candidates or not base:
            return {}
        left = self._accounts.setdefault(num_answers.bit_length(), _FIRST_STEPS * base)
        if left <= 0:
            return {}
        chances = [self._chance(sequence) for sequence, *_ in candidates]
        pays, least = self._judge(chances, own_rows, num_answers)
        if not pays:
            return self._try(candidates, left)
        asked = [
            (sequence, min(most, self._most))
            for (sequence, most, other), chance in zip(candidates, chances, strict=True)
            if sum(chance**place for place in range(1, self._most + 1)) > other
        ]
        return self._ask(asked, least)

    def observe(self, draft_rows: int, seconds: float, own_seconds: float, gained: int) -> None:
        """Book a step.

        Args:
            seconds: its duration, without drafting.
            own_seconds: drafting time.
            gained: tokens from the proposer's drafts.
        """
        size, costs = self._num_answers.bit_length(), self._controller.costs
        if size not in self._accounts:
            return
        base = costs.seconds(self._own_rows)
        change = FREE_SHARE * seconds
        if self._has_asked:
            change += gained * base / self._num_answers - own_seconds
            change -= costs.seconds(self._own_rows + draft_rows) - base
        self._accounts[size] = min(_MOST_STEPS * base, self._accounts[size] + change)
        self._has_asked = False

    def end(self, sequence: Sequence) -> None:
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
        tokens, best, length = float(num_answers), margin_of(num_answers) * num_answers / base, 0
        survivals = [1.0] * count
        for rounds in range(1, self._most + 1):
            survivals = [left * chance for left, chance in zip(survivals, chances, strict=True)]
            tokens += sum(survivals)
            rate = tokens / (costs.seconds(own_rows + rounds * count) + rounds * each)
            if rate > best:
                best, length = rate, rounds
        if not length:
            return False, 1.0
        # One more token must bring more than the same time brings without it.
        rows = length * count
        row = (costs.seconds(own_rows + rows) - base) / rows
        return True, (each / count + row) * best

    def _try(
        self, candidates: Ordered[tuple[Sequence, int, float]], left: float
    ) -> dict[Sequence, Proposal]:
        """Make a short draft for the sequence with the least to read, if there is time."""
        proposer = self._proposer
        free = {sequence: most for sequence, most, other in candidates if not other}
        if not free:
            return {}
        unread = {sequence: proposer.unread(sequence) for sequence in free}
        sequence = min(free, key=unread.__getitem__)
        needed = proposer.costs.seconds(1) * _TRIAL_TOKENS
        needed += proposer.read_seconds * unread[sequence]
        if needed > left:
            return {}
        self.is_trial = True
        return self._ask([(sequence, min(free[sequence], _TRIAL_TOKENS))], 0.0)

    def _ask(self, asked: Ordered[tuple[Sequence, int]], least: float) -> dict[Sequence, Proposal]:
        if not asked:
            return {}
        self._has_asked = True
        return self._proposer.propose(asked, self._controller.acceptance.chance, least)
