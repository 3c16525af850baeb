"""Proposes the tokens of answers that are known, with wrong ones at random between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence as Ordered

    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.nouns.plan import StepLoad
    from appliance.engine.nouns.request import FinishReason, Request
    from appliance.engine.nouns.sequence import Sequence

Answers = dict[tuple[str, int], tuple[list[int], list[Any], "FinishReason | None"]]


class ReplayingSpeculator:
    """Knows the answers of an engine without drafts.

    Args:
        answers: tokens first, by request and index.
        share: of the drafts that are right.
        matchers: of the engine, which cut drafts that a grammar does not allow.
        noise: decides which are right, and how many there are.
    """

    def __init__(
        self, answers: Answers, share: float, matchers: Matchers, noise: random.Random
    ) -> None:
        self._answers = answers
        self._share = share
        self._matchers = matchers
        self._noise = noise

    def check(self, request: Request) -> None:
        """See `Speculates`."""

    def awaits(self, answers: Ordered[tuple[Sequence, int, int]], room: int) -> bool:
        """Two of three times, if there may be drafts then."""
        may_draft = room > 0 and any(most > 0 for _, _, most in answers)
        return may_draft and self._noise.random() < 0.67

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None:
        """See `Speculates`."""

    def end(self, sequence: Sequence) -> None:
        """See `Speculates`."""

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Drafts of most answers."""
        found = {}
        for sequence, _, most in answers:
            count = min(most, room, self._noise.choice([0, 1, 2, 5, 15]))
            if count <= 0:
                continue
            tokens, *_ = self._answers[sequence.request.request_id, sequence.index]
            done = sequence.num_output_tokens
            drafts = tuple(
                token if self._noise.random() < self._share else self._noise.randrange(3, 90)
                for token in tokens[done : done + count]
            )
            if sequence.request.sampling.grammar is not None:
                drafts = self._matchers.trim(sequence, drafts)
            if drafts:
                found[sequence] = drafts
                room -= len(drafts)
        return found
