"""Chooses each answer's number of drafts in a step, from learned acceptance and costs of rows.

A draft is worth its probability of acceptance, and costs what one more row adds to the step. It
adds rows over all answers by falling probability while the step then yields more tokens a second. A
step without drafts is one of the choices, so it does not repeat a measured loss. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from math import exp, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.plan import StepLoad
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal


_MARGIN, _MARGIN_OF_SEVERAL = 1.05, 1.1
_CLEAR = 1.3  # gain from which on it does without a recent duration of a step without drafts
_RECENT = 24  # steps


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


def margin_of(num_answers: int) -> float:
    """Return the gain in tokens a second over a step without drafts that drafts must promise.

    Those chosen among several answers' are those overrated: of JSON at eight streams 82 % of the
    drafts' tokens were expected, and 72 % came true.
    """
    return _MARGIN if num_answers == 1 else _MARGIN_OF_SEVERAL


# Support at which the next kind begins: lengths of a match, or a draft model's probability in
# percent.
_LENGTHS, _PERCENT = (4, 6, 9, 16, 32), (30, 50, 70, 85, 95)
_BOUNDS = {"suffix": _LENGTHS, "forced": (), "draft": _PERCENT, "sampled draft": _PERCENT}
_FIRST = {
    "suffix": (0.35, 0.5, 0.6, 0.75, 0.85, 0.9),
    "forced": (0.98,),
    "draft": (0.25, 0.4, 0.55, 0.7, 0.8, 0.92),
    "sampled draft": (0.4, 0.5, 0.6, 0.7, 0.8, 0.92),
}
_FIRST_OF_ALL = 0.7  # tokens of a source
_ALL = -1  # stands for all kinds
_PRIOR = 4.0  # weight of the first guess, in tokens
_KEEP = 1 - 1 / 256  # weight kept at each token
_KEEP_OWN = 1 - 1 / 12  # the same for one sequence
_LEAST, _MOST = 0.01, 0.99
_HOPELESS = 0.1  # probability below which no draft is worth a row


class Acceptance:
    """Shares of accepted tokens by source and support, with a correction per sequence.

    Learns from every proposal, even one that was not run: the answer's next tokens arrive anyway.
    So it notices proposals that have become worth their rows while none is run.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], _Share] = {}
        self._open: dict[Sequence, _Open] = {}

    def watch(self, sequence: Sequence, proposal: Proposal) -> None:
        """Compare a proposal with a sequence's next tokens, once they arrive."""
        one = self._open.setdefault(sequence, _Open())
        one.position, one.proposal = len(sequence.token_ids), proposal

    def learn(self, sequence: Sequence) -> None:
        """Compare the last proposal for a sequence with its tokens since."""
        one = self._open.get(sequence)
        if one is None or one.proposal is None:
            return
        proposal, one.proposal = one.proposal, None
        actual = sequence.token_ids[one.position : one.position + len(proposal.token_ids)]
        source = proposal.source
        pairs = zip(proposal.token_ids, actual, strict=False)
        for place, (token_id, right) in enumerate(pairs):
            hit = token_id == right
            share = self._share(source, _kind(source, proposal.support_of(place)))
            surplus = one.surplus.get(source, 0.0)
            miss = hit - share.hits / share.tokens
            one.surplus[source] = _KEEP_OWN * surplus + (1 - _KEEP_OWN) * miss
            share.add(hit)
            self._share(source, _ALL).add(hit)
            if not hit:
                break

    def expected(self, sequence: Sequence, proposal: Proposal) -> list[float]:
        """Return the probability that each token and all before it are accepted.

        Omits tokens without a chance.
        """
        survival, found = 1.0, []
        for place in range(len(proposal.token_ids)):
            survival *= self.chance(sequence, proposal.source, proposal.support_of(place))
            if survival < _HOPELESS:
                break
            found.append(survival)
        return found

    def chance(self, sequence: Sequence, source: str, support: int) -> float:
        """Return a token's probability of acceptance if all before it are accepted; a `Chance`."""
        return self._chance(sequence, source, _kind(source, support))

    def typical(self, sequence: Sequence, source: str) -> float:
        """Return the probability of acceptance of a token without known support."""
        return self._chance(sequence, source, _ALL)

    def end(self, sequence: Sequence) -> None:
        self._open.pop(sequence, None)

    def _chance(self, sequence: Sequence, source: str, kind: int) -> float:
        one, share = self._open.get(sequence), self._share(source, kind)
        surplus = 0.0 if one is None else one.surplus.get(source, 0.0)
        return min(_MOST, max(_LEAST, share.hits / share.tokens + surplus))

    def _share(self, source: str, kind: int) -> _Share:
        share = self._shares.get((source, kind))
        if share is None:
            first = _FIRST_OF_ALL if kind == _ALL else _FIRST[source][kind]
            share = self._shares[source, kind] = _Share(first * _PRIOR)
        return share


def _kind(source: str, support: int) -> int:
    return sum([support >= bound for bound in _BOUNDS[source]])


@dataclass(slots=True)
class _Share:
    hits: float
    tokens: float = _PRIOR

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _KEEP + hit
        self.tokens = self.tokens * _KEEP + 1


@dataclass(slots=True)
class _Open:
    """A proposal whose tokens are still to come, and a sequence's surplus of acceptance."""

    position: int = 0
    proposal: Proposal | None = None
    surplus: dict[str, float] = field(default_factory=dict)  # by source


# Without measurements seconds grow with this power of the rows: higher than any model needs (0.4 to
# 0.7 in `scripts/bench/results/cpu/models.json`), so that it tries only promising drafts.
_GUESS = 0.75
_NEW = 1 / 8  # weight of a new step in a mean
_OUTLIER = 3.0  # a slower step counts as this many times its mean
_TRUSTED = 3  # steps; with fewer, the fastest counts
_STALE = 4096  # steps after which it forgets a duration that it has not seen again


class RowCosts:
    """Mean durations of answers' steps by their rows, interpolated by a power of the rows."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._rows: list[int] = []  # with a mean, in order
        self._step = 0

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step with answers only."""
        if rows <= 0 or seconds <= 0:
            return
        self._step += 1
        mean = self._means.get(rows)
        if mean is None:
            self._means[rows] = _Mean(seconds, 1, self._step)
            insort(self._rows, rows)
            self._forget()
            return
        mean.count += 1
        mean.step = self._step
        if mean.count <= _TRUSTED:
            mean.seconds = min(mean.seconds, seconds)
        else:
            mean.seconds += _NEW * (min(seconds, _OUTLIER * mean.seconds) - mean.seconds)

    def seconds(self, rows: int) -> float:
        """Predict a step's duration; 0 before anything was learned."""
        known = self._rows
        if not known:
            return 0.0
        mean = self._means.get(rows)
        if mean is not None:
            return mean.seconds
        place = bisect_left(known, rows)
        if place == 0:
            return self._scaled(known[0], rows)
        if place == len(known):
            return self._scaled(known[-1], rows)
        low, high = known[place - 1], known[place]
        share = log(rows / low) / log(high / low)
        first, last = self._means[low].seconds, self._means[high].seconds
        return exp((1 - share) * log(first) + share * log(last))

    def _scaled(self, known: int, rows: int) -> float:
        return float(self._means[known].seconds * (rows / known) ** _GUESS)

    def _forget(self) -> None:
        old = [rows for rows, mean in self._means.items() if mean.step < self._step - _STALE]
        for rows in old:
            del self._means[rows]
            self._rows.remove(rows)


@dataclass(slots=True)
class _Mean:
    seconds: float
    count: int
    step: int  # the last one
