"""The interface of a proposer, and what it proposes. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.sequence import Sequence


class Proposal(NamedTuple):
    """The likely next tokens of a sequence.

    Attributes:
        token_ids: the first follows the sequence's last token.
        source: the proposer's name; acceptance is counted by it and by `support`.
        support: how well founded the first token is, such as the length of a match; the token
            behind it has one more.
    """

    token_ids: tuple[int, ...]
    source: str
    support: int = 0


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
