"""Combines proposers and controller into each step's drafts. Imports no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from appliance.engine.speculation.controller import Controller, margin_of
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Ordered

    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.nouns.plan import StepLoad
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal, Proposer, SlowProposer


class Speculator:
    """Asks proposers in turn for a step's drafts.

    Args:
        proposers: the first with a proposal for a sequence wins.
        matchers: the grammars' states; drafts end before a forbidden token.
        most: drafts of one sequence in a step.
        asked_for: the setting that requires speculation, in words, or empty.
        slow: a slow proposer; asked when it pays and promises more than the others.
    """

    def __init__(
        self,
        proposers: Ordered[Proposer],
        matchers: Matchers,
        most: int,
        *,
        asked_for: str = "",
        slow: SlowProposer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.controller = Controller()
        self._asked_for = asked_for
        self.drafting = None if slow is None else Drafting(slow, self.controller, most)
        self.clock = clock
        self._spent = 0.0  # drafting seconds of the slow proposer, for the step being planned
        self._run: dict[Sequence, int] = {}  # length before that step, of sequences with its drafts
        self.proposers = tuple(proposers)
        self._matchers = matchers
        self._most = most

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        most_of = {one: min(most, self._most) for one, _, most in answers if most > 0}
        proposals = self._proposed(most_of)
        own_rows = sum([rows for _, rows, _ in answers])
        drafted = self._drafted(most_of, proposals, own_rows, len(answers))
        proposals |= drafted
        if not proposals:
            return {}
        proposals = self._watched(proposals)
        chosen = self.controller.choose(proposals, own_rows, len(answers), room)
        if self.drafting is not None and self.drafting.is_trial:
            for sequence in drafted.keys() & proposals.keys():
                left = room - sum(chosen.values()) + chosen.get(sequence, 0)
                chosen[sequence] = min(len(proposals[sequence].token_ids), left)
        self._run = {one: len(one.token_ids) for one in drafted.keys() & chosen.keys()}
        return {
            sequence: proposals[sequence].token_ids[:count] for sequence, count in chosen.items()
        }

    def awaits(self, answers: Ordered[tuple[Sequence, int, int]], room: int) -> bool:
        most_of = {one: min(most, self._most) + 1 for one, _, most in answers if most > 0}
        proposals = self._watched(self._proposed(most_of))
        own_rows = sum([rows for _, rows, _ in answers])
        return self.controller.awaits(proposals, own_rows, len(answers), room)

    def check(self, request: Request) -> None:
        """Refuse beam search if the settings require speculation.

        Raises:
            RequestError: the surviving beam is unknown until all are read.
        """
        if self._asked_for and request.sampling.use_beam_search:
            raise RequestError(
                f"beam search cannot be speculated on, and this engine runs with "
                f"{self._asked_for}; leave use_beam_search out, or start it with --speculate auto,"
                " which runs beams without drafts",
                param="use_beam_search",
            )

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None:
        """See `Speculates`; excludes drafting time from the cost of rows."""
        spent, self._spent = self._spent, 0.0
        self.controller.observe(load, seconds - spent, is_ahead=is_ahead)
        if self.drafting is not None:
            run, self._run = self._run, {}
            gained = sum([len(one.token_ids) - before - 1 for one, before in run.items()])
            rows = load.draft_rows if run else 0
            self.drafting.observe(rows, seconds - spent, spent, max(0, gained))

    def end(self, sequence: Sequence) -> None:
        self.controller.acceptance.end(sequence)
        for proposer in self.proposers:
            proposer.end(sequence)
        if self.drafting is not None:
            self.drafting.end(sequence)

    def _proposed(self, most_of: Mapping[Sequence, int]) -> dict[Sequence, Proposal]:
        """Ask the fast proposers, each for the sequences that those before it leave."""
        for sequence in most_of:
            self.controller.acceptance.learn(sequence)
        proposals: dict[Sequence, Proposal] = {}
        for proposer in self.proposers:
            asked = [(one, most) for one, most in most_of.items() if one not in proposals]
            if not asked:
                break
            proposals |= proposer.propose(asked)
        return proposals

    def _watched(self, proposals: dict[Sequence, Proposal]) -> dict[Sequence, Proposal]:
        """Return what grammars allow of proposals; learn from it once the next tokens are there."""
        proposals = self._allowed(proposals)
        for sequence, proposal in proposals.items():
            self.controller.acceptance.watch(sequence, proposal)
        return proposals

    def _drafted(
        self,
        most_of: Mapping[Sequence, int],
        proposals: dict[Sequence, Proposal],
        own_rows: int,
        num_answers: int,
    ) -> dict[Sequence, Proposal]:
        """Ask the slow proposer for sequences without a proposal, or with a weak one."""
        if self.drafting is None:
            return {}
        begin = self.clock()
        expected = self.controller.acceptance.expected
        candidates = []
        for sequence, most in most_of.items():
            proposal = proposals.get(sequence)
            if proposal is None:
                candidates.append((sequence, most, 0.0))
            elif proposal.source != "forced":
                candidates.append((sequence, most, sum(expected(sequence, proposal))))
        found = self.drafting.propose(candidates, own_rows, num_answers)
        self._spent = self.clock() - begin
        return found

    def _allowed(self, proposals: dict[Sequence, Proposal]) -> dict[Sequence, Proposal]:
        """Cut proposals before a token that the grammar forbids."""
        found = {}
        for sequence, proposal in proposals.items():
            if sequence.request.sampling.grammar is not None:
                trimmed = self._matchers.trim(sequence, proposal.token_ids)
                proposal = proposal._replace(token_ids=trimmed)
            if proposal.token_ids:
                found[sequence] = proposal
        return found


FREE_SHARE = 0.01  # of the time of steps
_TRIAL_TOKENS = 3
_FIRST_STEPS, _MOST_STEPS = 16, 48  # initial and maximum balance: the time of steps


class Drafting:
    """Asks a slow proposer, as far as that pays, and decides the length of its drafts.

    Chooses the length with the most tokens a second, drafting time included. An account corrects
    wrong estimates: each step adds a small share of its time and the time that accepted tokens have
    saved, and pays for reading, drafting and the rows of drafts; nobody is asked while it is empty.
    So a proposer costs at most that share. Steps of few and of many answers have separate accounts,
    because drafting may pay in one only.

    Args:
        controller: knows steps' costs, and acceptance.
        most: tokens of a draft.

    Attributes:
        is_trial: run its last result to learn costs and acceptance.
    """

    def __init__(self, proposer: SlowProposer, controller: Controller, most: int) -> None:
        self.proposer = proposer
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
        self.proposer.end(sequence)

    def _chance(self, sequence: Sequence) -> float:
        source = self.proposer.source(sequence)
        return self._controller.acceptance.typical(sequence, source)

    def _judge(
        self, chances: Ordered[float], own_rows: int, num_answers: int
    ) -> tuple[bool, float]:
        """Return True if drafts pay, and the chance from which on a draft gets one more token."""
        costs, count = self._controller.costs, len(chances)
        each, base = self.proposer.costs.seconds(count), costs.seconds(own_rows)
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
        proposer = self.proposer
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
        return self.proposer.propose(asked, self._controller.acceptance.chance, least)
