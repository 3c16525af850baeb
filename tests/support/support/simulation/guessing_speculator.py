"""Proposes the virtual model's next tokens, and wrong ones at random."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from support.simulation.simulated_pictures import read_of
from support.simulation.virtual_model import VOCAB, content_of, next_token

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.plan import StepLoad
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence


class GuessingSpeculator:
    """`share` of the tokens is right; `noise` chooses which, and how many there are."""

    def __init__(self, share: float, noise: random.Random) -> None:
        self._share = share
        self._noise = random.Random(noise.randrange(2**32))
        self._last: dict[Sequence, tuple[int, int]] = {}  # tokens read so far, and their hash

    def propose(
        self, answers: Ordered[tuple[Sequence, int, int]], room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Propose drafts for most sequences, sometimes of the maximum length."""
        drafts = {}
        for sequence, _, most in answers:
            count = min(most, room, self._noise.choice([0, 1, 2, 4, 15, 15]))
            if count > 0:
                room -= count
                drafts[sequence] = self._guess(sequence, count)
        return drafts

    def awaits(self, answers: Ordered[tuple[Sequence, int, int]], room: int) -> bool:
        """Await every second time, if there may be drafts then."""
        may_draft = room > 0 and any(most > 0 for _, _, most in answers)
        return may_draft and self._noise.random() < 0.5

    def check(self, request: Request) -> None:
        """See `Speculates`."""

    def observe(self, load: StepLoad, seconds: float, *, is_ahead: bool = False) -> None:
        """See `Speculates`."""

    def end(self, sequence: Sequence) -> None:
        """See `Speculates`."""
        self._last.pop(sequence, None)

    def _guess(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        salt = sequence.request.cache_salt
        known, last = self._last.get(sequence, (0, 0))
        for token in read_of(sequence, known, len(sequence.token_ids)):
            last = content_of(salt, last, token)
        self._last[sequence] = len(sequence.token_ids), last
        drafts = []
        for _ in range(count):
            is_right = self._noise.random() < self._share
            right = next_token(last, sequence.index)
            drafts.append(right if is_right else self._noise.randrange(VOCAB))
            last = content_of(salt, last, drafts[-1])
        return tuple(drafts)
