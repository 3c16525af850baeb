"""Converts token ids to text as they arrive, and finds stop strings in it."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.tokenizer.tokenizer import Tokenizer


class DecodeStream:
    """Decodes one growing answer. Skips control tokens, except those in `shown`.

    Works on bytes: emits a character that spans several tokens when its last byte arrives. Caches
    the text of tokens that are whole characters, as most are.

    Args:
        shown: control tokens to emit as text.
    """

    def __init__(self, tokenizer: Tokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._whole_text = tokenizer.whole_text
        self._shown = {token_id: tokenizer.token_bytes(token_id) for token_id in shown}
        self._begun = b""  # an incomplete character

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the characters they complete."""
        text = ""
        for token_id in token_ids:
            known = not self._begun and token_id not in self._shown
            whole = self._whole_text[token_id] if known else None
            text += self._decode(token_id) if whole is None else whole
        return text

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character."""
        text, _ = codecs.utf_8_decode(self._begun, "replace", True)
        self._begun = b""
        return text

    def _decode(self, token_id: int) -> str:
        added = self._shown.get(token_id)
        data = self._begun + (self._visible_bytes(token_id) if added is None else added)
        text, length = codecs.utf_8_decode(data, "replace", False)
        self._begun = data[length:]
        return text


class StopStringMatcher:
    """Finds the first complete stop string and emits no part of it.

    The result does not depend on how the text is split. Each character takes a few steps for each
    string, whatever its length (Knuth, Morris and Pratt 1977).

    Args:
        stop: non-empty strings that end the text.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), stop
        self._stop = sorted(set(stop), key=len, reverse=True)  # of two that end together the longer
        self._fallbacks: list[list[int]] | None = None  # once a string may have begun
        self._matched = [0] * len(self._stop)  # characters of each that the text ends with
        self._openings = {string[0] for string in stop}
        self._held: deque[str] = deque()  # a suffix that could still become a stop string
        self._begin = 0  # of that suffix in the first piece
        self._length = 0  # of that suffix
        self.matched = ""  # the stop string found

    def push(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns:
            The text that no stop string can include, and True if one is complete; text behind a
            match is dropped, of later calls too.
        """
        if self.matched:
            return "", True
        if not text or (not self._length and self._openings.isdisjoint(text)):
            return text, False  # the usual case
        if self._fallbacks is None:
            self._fallbacks = list(map(_fallbacks, self._stop))
        before = self._length
        self._held.append(text)
        self._length += len(text)
        for end, character in enumerate(text, before + 1):
            for number, stop in enumerate(self._stop):
                if self._advance(number, character) == len(stop):
                    self.matched = stop
                    return self._take(end - len(stop)), True
        return self._take(self._length - max(self._matched)), False

    def flush(self) -> str:
        """Return the held-back text at the end of the answer."""
        return "" if self.matched else self._take(self._length)

    def _take(self, count: int) -> str:
        """Return the first characters of what is held, and hold them no longer.

        What stays is not copied, however long it is.
        """
        self._length -= count
        taken = []
        while count:
            piece = self._held[0]
            end = min(self._begin + count, len(piece))
            taken.append(piece[self._begin : end])
            count -= end - self._begin
            self._begin = end
            if end == len(piece):
                self._held.popleft()
                self._begin = 0
        return "".join(taken)

    def _advance(self, number: int, character: str) -> int:
        """Return how much of a stop string the text ends with after one more character."""
        assert self._fallbacks is not None
        stop, fallbacks, matched = (
            self._stop[number],
            self._fallbacks[number],
            self._matched[number],
        )
        while matched and stop[matched] != character:
            matched = fallbacks[matched - 1]
        self._matched[number] = matched + (stop[matched] == character)
        return self._matched[number]


def _fallbacks(stop: str) -> list[int]:
    """Return for each prefix the length of the longest other one that it ends with."""
    found = [0]
    length = 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = found[length - 1]
        length += stop[length] == character
        found.append(length)
    return found
