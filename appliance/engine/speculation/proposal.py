"""The interface of a proposer, and what it proposes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from appliance.engine.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.speculation.row_costs import RowCosts

# The probability that a token comes true, by sequence, source and support.
Chance = Callable[[Sequence, str, int], float]


class Proposal(NamedTuple):
    """The likely next tokens of a sequence.

    Attributes:
        token_ids: the first follows the sequence's last token.
        source: the proposer's name; acceptance is counted by it and by `support`.
        support: how well founded the first token is, such as the length of a match; the token
            behind it has one more.
        supports: of each token, where they do not follow from the first one's.
    """

    token_ids: tuple[int, ...]
    source: str
    support: int = 0
    supports: tuple[int, ...] = ()

    def support_of(self, place: int) -> int:
        """Return how well founded a token is."""
        return self.supports[place] if self.supports else self.support + place


class Proposer(Protocol):
    """Proposes tokens; what it says decides the speed of an answer and never its content."""

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        """Return proposals for those that it knows something of.

        Args:
            answers: running sequences, each with the most tokens of use, at least 1.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...


class SlowProposer(Protocol):
    """Proposes tokens at a price, so it is asked where that pays.

    Attributes:
        costs: seconds of one more token of each draft, by the number of drafts.
        read_seconds: of a token that has to be read before the first draft; 0 if unknown.
    """

    @property
    def costs(self) -> RowCosts: ...
    @property
    def read_seconds(self) -> float: ...

    def source(self, sequence: Sequence) -> str:
        """Return the source of proposals for a sequence."""
        ...

    def unread(self, sequence: Sequence) -> int:
        """Return how many tokens have to be read before the first draft."""
        ...

    def propose(
        self, answers: Ordered[tuple[Sequence, int]], chance: Chance, least: float
    ) -> dict[Sequence, Proposal]:
        """Return proposals; none for sequences that have much to read.

        Args:
            answers: see `Proposer`.
            chance: of a token.
            least: chance of a whole draft below which it does not go on.
        """
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...
