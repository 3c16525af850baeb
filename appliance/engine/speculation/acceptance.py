"""Learns how often drafts are accepted. Imports no torch.

Learns from every proposal, even one that was not run: the answer's next tokens arrive anyway. So it
notices proposals that have become worth their rows while none is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal

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


class Acceptance:
    """Shares of accepted tokens by source and support, with a correction per sequence."""

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
