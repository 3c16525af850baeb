"""Tracks each running sequence's state in its grammar and makes its token masks.

Imports no torch.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from appliance.grammar import GrammarKind
from appliance.grammar.check import in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray

    from appliance.engine.grammars.library import GrammarState
    from appliance.engine.nouns.plan import Update
    from appliance.engine.nouns.sequence import Sequence

NO_WAY_ON = "the grammar cannot go on"  # begins an error that is the request's fault
_WORDS = 16  # mask words come in multiples of this, one compiled kernel each


@dataclass(slots=True)
class _Place:
    """A sequence's state in its grammar, after the tokens before `position`."""

    matcher: GrammarState
    position: int
    applies: bool  # False until the token after which it begins


@dataclass(frozen=True, slots=True)
class Masks:
    """Token masks for some rows of a step.

    Attributes:
        rows: the step's rows that have a grammar.
        words: (num_rows, words of a mask) int32, one bit per token, low bits first.
        over: rows that allow only the end.
        errors: by row, the reason why no token is allowed.
    """

    rows: Sequences[int]
    words: NDArray[np.int32]
    over: Collection[int] = ()
    errors: Mapping[int, str] = field(default_factory=dict)


class Matchers:
    """The states of all sequences with a grammar; used by one thread.

    Other threads make a step's masks without the GIL while its model runs: between `begin` and the
    masks' arrival, call nothing else.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        bits = np.zeros((1, 32 * num_words(vocab_size)), dtype=np.uint8)
        bits[0, list(eos_token_ids or (vocab_size,))] = 1
        self._only_end = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._has_end = bool(eos_token_ids)
        self._first: dict[str, GrammarState] = {}  # initial state by request id
        self.places: dict[Sequence, _Place] = {}
        self._thread: ThreadPoolExecutor | None = None

    def add(self, request_id: str, matcher: GrammarState, live: Collection[Sequence]) -> None:
        """Add a request about to start; forget sequences that are no longer live."""
        self._keep(live)
        self._first[request_id] = matcher

    def clear(self) -> None:
        self._first.clear()
        self.places.clear()

    def begin(
        self, asked: Sequences[tuple[Sequence, tuple[int, ...]]], rows: Sequences[int]
    ) -> Future[Masks] | None:
        """Start making the masks of a step.

        Args:
            asked: a sequence per row, and the drafts before that row, already trimmed; those of one
                sequence are adjacent, shortest first.

        Returns:
            The masks of rows whose grammar has begun; None if there are none.
        """
        found = [
            (place, row, drafts)
            for (sequence, drafts), row in zip(asked, rows, strict=True)
            if (place := self._place(sequence)).applies
        ]
        if not found:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._thread.submit(self._fill, found)

    def advance(self, updates: Sequences[Update]) -> dict[Sequence, str | None]:
        """Advance by a step's tokens.

        Returns:
            Sequences whose grammar is complete, each with a reason if a token did not match.
        """
        ended: dict[Sequence, str | None] = {}
        for update in updates:
            sequence = update.sequence
            if update.finish_reason is not None or sequence.request.sampling.grammar is None:
                continue
            place = self._place(sequence)
            if place.matcher.is_error():
                ended[sequence] = _why(place)
            elif place.applies and self._is_over(place):
                ended[sequence] = None
        return ended

    def forced(self, sequence: Sequence) -> list[int]:
        """Return the tokens that the grammar forces next, in the likeliest spelling."""
        place = self._place(sequence)
        if not place.applies or place.matcher.is_error():
            return []
        return place.matcher.compute_ff_tokens()

    def trim(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading drafts that the grammar allows and that do not complete it."""
        place = self._place(sequence)
        if not place.applies:
            after = sequence.request.sampling.grammar
            assert after is not None
            return drafts[: drafts.index(after.after)] if after.after in drafts else drafts
        if place.matcher.is_error():
            return ()
        count = taken = 0
        for token_id in drafts:
            if place.matcher.validate_tokens([token_id]) != 1:
                break
            place.matcher.consume_token(token_id)
            taken += 1
            if self._is_over(place):
                break
            count += 1
        place.matcher.rollback(taken)
        return drafts[:count]

    def _is_over(self, place: _Place) -> bool:
        if self._has_end or not place.matcher.is_accepting():
            return place.matcher.is_stopped()
        # No token stands for the end.
        return self._fill([(place, 0, ())]).over == [0]

    def _place(self, sequence: Sequence) -> _Place:
        """Return the state after all tokens of the sequence."""
        place = self.places.get(sequence)
        grammar = sequence.request.sampling.grammar
        assert grammar is not None
        if place is None or place.position > len(sequence.token_ids):
            first = self._first[sequence.request.request_id]
            place = _Place(first.deep_copy(), sequence.num_prompt_tokens, grammar.after is None)
            self.places[sequence] = place
        if place.position < len(sequence.token_ids):
            tokens = sequence.token_ids[place.position :]
            place.position = len(sequence.token_ids)
            if not place.applies and grammar.after in tokens:
                tokens = tokens[tokens.index(grammar.after) + 1 :]
                place.applies = True
            if place.applies and tokens:
                place.matcher.consume_tokens(tokens)
        return place

    def _fill(self, found: list[tuple[_Place, int, tuple[int, ...]]]) -> Masks:
        words = np.zeros((len(found), self._only_end.shape[1]), dtype=np.int32)
        matchers = [
            (place.matcher, index) for index, (place, _, drafts) in enumerate(found) if not drafts
        ]
        # Imports a library that most servers never need.
        from appliance.engine.grammars.library import open_library

        library = open_library()
        library.fill(matchers, words)
        ahead: dict[int, tuple[GrammarState, int]] = {}  # by id, with the number of drafts read
        for index, (place, _, drafts) in enumerate(found):
            if drafts:
                place.matcher.consume_token(drafts[-1])
                library.fill([(place.matcher, index)], words)
                ahead[id(place)] = place.matcher, len(drafts)
        for matcher, count in ahead.values():
            matcher.rollback(count)
        over, errors = [], {}
        only_end = (words == self._only_end).all(axis=1).tolist()
        for index, (place, row, _) in enumerate(found):
            if place.matcher.is_error():  # after an error the library wrongly allows the end
                words[index] = 0
                errors[row] = _why(place)
            elif only_end[index]:
                over.append(row)
        return Masks([row for _, row, _ in found], words, over, errors)

    def _keep(self, live: Collection[Sequence]) -> None:
        kept = set(live)
        ids = {sequence.request.request_id for sequence in kept}
        self._first = {key: value for key, value in self._first.items() if key in ids}
        self.places = {key: value for key, value in self.places.items() if key in kept}


def num_words(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask, with a bit for the end of an answer."""
    return -(-(vocab_size + 1) // (32 * _WORDS)) * _WORDS


def _why(place: _Place) -> str:
    return f"{NO_WAY_ON}: {in_words(place.matcher.get_error(), GrammarKind.LARK)}"
