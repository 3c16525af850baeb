"""Proposes the tokens that followed the last ones earlier: in the sequence, or in earlier answers.

Prompt lookup and suffix decoding (arXiv 2411.04975) with one place per window of tokens. Only
requests with the same cache salt share earlier answers. Imports no torch.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.speculation.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from numpy.typing import NDArray

    from appliance.engine.nouns.sequence import Sequence


WINDOWS = (8, 3)  # tokens; the longest match wins
MAX_MATCH = 32  # tokens compared
BYTES_PER_TOKEN = 4 + len(WINDOWS) * 4 * 4  # at most: tables are up to four times as long
SEPARATOR = -1  # between texts: no token, so no match crosses it
_MASK64 = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that all bits of a token reach the top ones
# Factor of a window's first token.
_LEAVING = tuple(pow(_BASE, window, 2**64) for window in WINDOWS)
_SMALLEST = 256  # places of the smallest table
MAX_BYTES = 64 * 2**20
READ_PER_STEP = 1024  # tokens of a sequence: a long prompt takes several steps
CORPUS_TOKENS = MAX_BYTES // BYTES_PER_TOKEN // 4  # of all earlier answers
HISTORY_TOKENS = MAX_BYTES // BYTES_PER_TOKEN - CORPUS_TOKENS  # of all running sequences
SALT_TOKENS = CORPUS_TOKENS // 4  # of one cache salt


class SuffixProposer:
    """Looks each answer's last tokens up in its own text, then in earlier answers.

    Args:
        history_tokens: maximum read of all running sequences together.
    """

    def __init__(
        self, corpus: Corpus | None = None, *, history_tokens: int = HISTORY_TOKENS
    ) -> None:
        self._corpus = corpus or Corpus()
        self._histories: dict[Sequence, TokenIndex] = {}
        self._room = history_tokens

    def propose(self, answers: Ordered[tuple[Sequence, int]]) -> dict[Sequence, Proposal]:
        """See `Proposer`; the support of a proposal is the length of its match."""
        found: dict[Sequence, Proposal] = {}
        for sequence, most in answers:
            text, history = sequence.token_ids, self._read(sequence)
            ends = history.ends if len(history) == len(text) else ends_of(text)
            length, tokens = history.find(text, ends, most)
            if length < MAX_MATCH:
                other = self._corpus.find(sequence.request.cache_salt, text, ends, most)
                if other[0] > length:
                    length, tokens = other
            if tokens:
                found[sequence] = Proposal(tokens, "suffix", length)
        return found

    def end(self, sequence: Sequence) -> None:
        """Keep an answer for later ones."""
        history = self._histories.pop(sequence, None)
        if history is not None:
            self._room += len(history)
        if sequence.num_output_tokens > 1 and not sequence.request.sampling.use_beam_search:
            answer = sequence.token_ids[sequence.num_prompt_tokens :]
            self._corpus.add(sequence.request.cache_salt, answer)

    def _read(self, sequence: Sequence) -> TokenIndex:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = TokenIndex()
        begin = len(history)
        added = sequence.token_ids[begin : begin + min(READ_PER_STEP, self._room)]
        if added:
            if sequence.request.pictures is not None:  # rows without a token
                added = [max(token_id, SEPARATOR) for token_id in added]
            history.extend(added)
            self._room -= len(added)
        return history


class Corpus:
    """Recent answers of recent cache salts.

    Args:
        salt_tokens: maximum per salt.
        all_tokens: maximum of all salts.
    """

    def __init__(self, salt_tokens: int = SALT_TOKENS, all_tokens: int = CORPUS_TOKENS) -> None:
        self._salt_tokens = salt_tokens
        self._all_tokens = all_tokens
        # The older half and the newer: a full newer half becomes the older.
        self._halves: OrderedDict[str, tuple[TokenIndex, TokenIndex]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, chain.from_iterable(self._halves.values())))

    def add(self, salt: str, token_ids: Ordered[int]) -> None:
        """Keep an answer's tokens, or the last ones of a long answer."""
        half = self._salt_tokens // 2
        old, new = self._halves.pop(salt, (TokenIndex(), TokenIndex()))
        kept = [*token_ids[-(half - 1) :], SEPARATOR]
        if len(new) + len(kept) > half:
            old, new = new, TokenIndex()
        new.extend(kept)
        self._halves[salt] = old, new
        while len(self._halves) > 1 and self.num_tokens > self._all_tokens:
            self._halves.popitem(last=False)

    def find(
        self, salt: str, text: Ordered[int], ends: tuple[int, ...], most: int
    ) -> tuple[int, tuple[int, ...]]:
        """See `TokenIndex.find`; prefers the newer of two equal matches."""
        old, new = self._halves.get(salt, (None, None))
        if old is None or new is None:
            return 0, ()
        found = new.find(text, ends, most)
        other = old.find(text, ends, most)
        return other if other[0] > found[0] else found


class TokenIndex:
    """A growing list of token ids and the places of their windows.

    Finds earlier places of a text's last tokens in constant time: a table maps hashed windows to
    their last place. It compares the tokens there, so a collision costs a match and never finds a
    wrong one.

    Attributes:
        tokens: all of them, 32 bits each.
        ends: `ends_of` them.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.ends: tuple[int, ...] = ends_of(self.tokens)
        self.tables = [array("i", [-1]) * _SMALLEST for _ in WINDOWS]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Ordered[int]) -> None:
        # A window is findable once a token follows it, so that a text's end does not find itself.
        if len(token_ids) <= 16 and len(self.tokens) + len(token_ids) <= len(self.tables[0]) // 2:
            for token_id in token_ids:  # the usual case: a step's tokens
                self._append(token_id)
            return
        first = max(0, len(self.tokens) - 1)
        self.tokens.extend(token_ids)
        if len(self.tokens) > len(self.tables[0]) // 2:
            size = len(self.tables[0])
            while size < 2 * len(self.tokens):
                size *= 2
            self.tables = [array("i", [-1]) * size for _ in WINDOWS]
            first = 0
        self._put_many(first)
        self.ends = ends_of(self.tokens)

    def find(
        self, text: Ordered[int], ends: tuple[int, ...], most: int
    ) -> tuple[int, tuple[int, ...]]:
        """Return the length of the best match of a text's end, and the tokens after it.

        Args:
            ends: `ends_of` the text.
            most: maximum number of tokens to return.
        """
        for window, table, end in zip(WINDOWS, self.tables, ends, strict=True):
            place = table[end >> (65 - len(table).bit_length())]
            if place < 0:
                continue
            length = self._match(text, place)
            if length >= window:
                following = self.tokens[place + 1 : place + 1 + most]
                if SEPARATOR in following:
                    following = following[: following.index(SEPARATOR)]
                return length, tuple(following)
        return 0, ()

    def _match(self, text: Ordered[int], place: int) -> int:
        """Count the tokens up to a place that equal the text's last ones."""
        tokens, length = self.tokens, 0
        most = min(MAX_MATCH, len(text), place + 1)
        while length < most and tokens[place - length] == text[-1 - length]:
            length += 1
        return length

    def _append(self, token_id: int) -> None:
        tokens, ends, last = self.tokens, [], len(self.tokens) - 1
        for window, table, end, leaving in zip(
            WINDOWS, self.tables, self.ends, _LEAVING, strict=True
        ):
            first = last + 1 - window
            if first >= 0:
                table[end >> (65 - len(table).bit_length())] = last
                end -= tokens[first] * leaving
            ends.append(((end + token_id) * _BASE) & _MASK64)
        tokens.append(token_id)
        self.ends = tuple(ends)

    def _put_many(self, first: int) -> None:
        """Put the windows that end at `first` or later, as `_append` does."""
        for window, table in zip(WINDOWS, self.tables, strict=True):
            begin = max(0, first + 1 - window)
            tokens = np.frombuffer(self.tokens, dtype=np.int32)[begin:-1].astype(np.uint64)
            if len(tokens) >= window:
                places = np.arange(begin + window - 1, begin + len(tokens), dtype=np.int32)
                found = np.frombuffer(table, dtype=np.int32)
                found[_slots(tokens, window, len(table))] = places


def ends_of(text: Ordered[int]) -> tuple[int, ...]:
    """Return a hash of a text's last tokens for each window, 64 bits; of all, if it is shorter."""
    found = []
    for window in WINDOWS:
        value = 0
        for token_id in text[-window:]:
            value = ((value + token_id) * _BASE) & _MASK64
        found.append(value)
    return tuple(found)


def _slots(tokens: NDArray[np.uint64], window: int, size: int) -> NDArray[np.uint64]:
    count = len(tokens) - window + 1
    values = np.zeros(count, dtype=np.uint64)
    for place in range(window):
        values += tokens[place : place + count]
        values *= np.uint64(_BASE)
    return values >> np.uint64(65 - size.bit_length())
