"""Learns how often proposed tokens come true. Imports no torch.

It learns from every proposal, also from those that were not run: the next tokens of an answer come
anyway. So proposals that have become worth their rows are noticed while none is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.sequence import Sequence
    from appliance.engine.speculation.proposal import Proposal

# Support from which on a token counts to the next kind: lengths of a match, or the percentage that
# a draft model gives it.
_LENGTHS, _PERCENT = (4, 6, 9, 16, 32), (30, 50, 70, 85, 95)
_BOUNDS = {"suffix": _LENGTHS, "forced": (), "draft": _PERCENT, "sampled draft": _PERCENT}
_FIRST = {
    "suffix": (0.35, 0.5, 0.6, 0.75, 0.85, 0.9),
    "forced": (0.98,),
    "draft": (0.25, 0.4, 0.55, 0.7, 0.8, 0.92),
    "sampled draft": (0.4, 0.5, 0.6, 0.7, 0.8, 0.92),
}
_FIRST_OF_ALL = 0.7  # tokens of a source
_ALL = -1  # in the place of a kind
_PRIOR = 4.0  # tokens that the first guess counts as
_KEEP = 1 - 1 / 256  # weight of a token in the next one's estimate
_KEEP_OWN = 1 - 1 / 12  # the same for one sequence
_LEAST, _MOST = 0.01, 0.99
_HOPELESS = 0.1  # probability below which nothing is worth a row


@dataclass(slots=True)
class _Share:
    hits: float
    tokens: float = _PRIOR

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _KEEP + hit
        self.tokens = self.tokens * _KEEP + 1


@dataclass(slots=True)
class _Open:
    """A proposal whose tokens are still to come, and the surplus of a sequence's acceptance."""

    position: int = 0
    proposal: Proposal | None = None
    surplus: dict[str, float] = field(default_factory=dict)  # by source


class Acceptance:
    """Shares of accepted tokens by source and support, with a correction for each sequence."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], _Share] = {}
        self._open: dict[Sequence, _Open] = {}

    def watch(self, sequence: Sequence, proposal: Proposal) -> None:
        """Compare a proposal with the next tokens of a sequence, once they are there."""
        one = self._open.setdefault(sequence, _Open())
        one.position, one.proposal = len(sequence.token_ids), proposal

    def learn(self, sequence: Sequence) -> None:
        """Compare the latest proposal for a sequence with the tokens it has since."""
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
        """Return the probability that each token, and all before it, come true.

        Tokens without a chance are left out.
        """
        survival, found = 1.0, []
        for place in range(len(proposal.token_ids)):
            survival *= self.chance(sequence, proposal.source, proposal.support_of(place))
            if survival < _HOPELESS:
                break
            found.append(survival)
        return found

    def chance(self, sequence: Sequence, source: str, support: int) -> float:
        """Return the probability that a token comes true if all before it do; a `Chance`."""
        return self._chance(sequence, source, _kind(source, support))

    def typical(self, sequence: Sequence, source: str) -> float:
        """Return the probability that a token comes true of which nothing is known yet."""
        return self._chance(sequence, source, _ALL)

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence."""
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
