"""Finds earlier places of a text's last tokens in constant time.

A table maps hashed windows to their last place. It compares the tokens there, so a collision costs
a match and never finds a wrong one. Imports no torch.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from numpy.typing import NDArray

WINDOWS = (8, 3)  # tokens; the longest match wins
MAX_MATCH = 32  # tokens compared
BYTES_PER_TOKEN = 4 + len(WINDOWS) * 4 * 4  # at most: tables are up to four times as long
SEPARATOR = -1  # between texts: no token, so no match crosses it

_MASK64 = 2**64 - 1
_BASE = 0x9E3779B97F4A7C15  # odd, so that all bits of a token reach the top ones
_SMALLEST = 256  # places of the smallest table


class TokenIndex:
    """A growing list of token ids and the places of their windows.

    Attributes:
        tokens: all of them, 32 bits each.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self._tables = [array("i", [-1]) * _SMALLEST for _ in WINDOWS]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Ordered[int]) -> None:
        # A window is findable once a token follows it, so that a text's end does not find itself.
        first = max(0, len(self.tokens) - 1)
        self.tokens.extend(token_ids)
        if len(self.tokens) > len(self._tables[0]) // 2:
            size = len(self._tables[0])
            while size < 2 * len(self.tokens):
                size *= 2
            self._tables = [array("i", [-1]) * size for _ in WINDOWS]
            first = 0
        if len(self.tokens) - 1 - first <= 4:  # the usual case: a step's tokens
            for last in range(first, len(self.tokens) - 1):
                self._put(last)
        else:
            self._put_many(first)

    def find(self, context: Ordered[int], most: int) -> tuple[int, tuple[int, ...]]:
        """Return the length of the best match of a text's end, and the tokens after it.

        Args:
            context: the text's last tokens, `MAX_MATCH` at most.
            most: maximum number of tokens to return.
        """
        for window, table in zip(WINDOWS, self._tables, strict=True):
            if len(context) < window:
                continue
            place = table[_slot(context[-window:], len(table))]
            if place < 0:
                continue
            length = self._match(context, place)
            if length >= window:
                following = self.tokens[place + 1 : place + 1 + most]
                if SEPARATOR in following:
                    following = following[: following.index(SEPARATOR)]
                return length, tuple(following)
        return 0, ()

    def _match(self, context: Ordered[int], place: int) -> int:
        """Count the tokens up to a place that equal the context's last ones."""
        tokens, length = self.tokens, 0
        for token_id in reversed(context):
            if length > place or tokens[place - length] != token_id:
                break
            length += 1
        return length

    def _put(self, last: int) -> None:
        for window, table in zip(WINDOWS, self._tables, strict=True):
            if last + 1 >= window:
                table[_slot(self.tokens[last + 1 - window : last + 1], len(table))] = last

    def _put_many(self, first: int) -> None:
        """Put the windows that end at `first` or later, as `_put` does."""
        for window, table in zip(WINDOWS, self._tables, strict=True):
            begin = max(0, first + 1 - window)
            tokens = np.frombuffer(self.tokens, dtype=np.int32)[begin:-1].astype(np.uint64)
            if len(tokens) >= window:
                places = np.arange(begin + window - 1, begin + len(tokens), dtype=np.int32)
                found = np.frombuffer(table, dtype=np.int32)
                found[_slots(tokens, window, len(table))] = places


def _slot(window: Ordered[int], size: int) -> int:
    value = 0
    for token_id in window:
        value = ((value + token_id) * _BASE) & _MASK64
    return value >> (65 - size.bit_length())


def _slots(tokens: NDArray[np.uint64], window: int, size: int) -> NDArray[np.uint64]:
    count = len(tokens) - window + 1
    values = np.zeros(count, dtype=np.uint64)
    for place in range(window):
        values += tokens[place : place + count]
        values *= np.uint64(_BASE)
    return values >> np.uint64(65 - size.bit_length())
