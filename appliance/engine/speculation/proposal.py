"""Proposals, the interface of proposers, and the one that asks the grammars. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from appliance.engine.nouns.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.speculation.controller import RowCosts


# Probability of a token's acceptance, by sequence, source and support.
Chance = Callable[[Sequence, str, int], float]


class Proposal(NamedTuple):
    """The likely next tokens of a sequence.

    Attributes:
        token_ids: the first follows the sequence's last token.
        source: the proposer's name; counts acceptance, with `support`.
        support: evidence for the first token, such as the length of a match; each later token has
            one more.
        supports: per token, if they do not follow from the first one's.
    """

    token_ids: tuple[int, ...]
    source: str
    support: int = 0
    supports: tuple[int, ...] = ()

    def support_of(self, place: int) -> int:
        return self.supports[place] if self.supports else self.support + place


class Proposer(Protocol):
    """Proposes tokens; affects an answer's speed, never its content."""

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        """Return proposals for some of the answers.

        Args:
            answers: running sequences, each with the maximum of useful tokens, at least 1.
        """
        ...

    def end(self, sequence: Sequence) -> None: ...


class SlowProposer(Protocol):
    """Proposes tokens at a cost, so it is asked only when that pays.

    Attributes:
        costs: seconds of one more token per draft, by number of drafts.
        read_seconds: per token to read before the first draft; 0 if unknown.
    """

    @property
    def costs(self) -> RowCosts: ...
    @property
    def read_seconds(self) -> float: ...

    def source(self, sequence: Sequence) -> str: ...

    def unread(self, sequence: Sequence) -> int:
        """Return the number of tokens to read before the first draft."""
        ...

    def propose(
        self, answers: Ordered[tuple[Sequence, int]], chance: Chance, least: float
    ) -> dict[Sequence, Proposal]:
        """Return proposals; none for sequences with much to read.

        Args:
            answers: see `Proposer`.
            chance: of a token.
            least: stop a draft when its chance as a whole falls below this.
        """
        ...

    def end(self, sequence: Sequence) -> None: ...


class ForcedProposer:
    """Proposes the tokens that a grammar forces; shares `matchers` with the sampler."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        found = {}
        for sequence, most in answers:
            if sequence.request.sampling.grammar is not None:
                forced = self._matchers.forced(sequence)
                if forced:
                    found[sequence] = Proposal(tuple(forced[:most]), "forced")
        return found

    def end(self, sequence: Sequence) -> None:
        """Do nothing: the grammars forget by themselves."""
