"""Finds stop strings in streamed text."""

from __future__ import annotations


class StopStringMatcher:
    """Finds the first complete stop string and emits no part of it.

    The result does not depend on how the text is split.

    Args:
        stop: non-empty strings that end the text.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        assert all(stop), stop
        self._stop = stop
        self._openings = {string[0] for string in stop}
        self._held = ""  # a suffix that could still become a stop string
        self.matched = ""  # the stop string found

    def push(self, text: str) -> tuple[str, bool]:
        """Add text.

        Returns:
            The text that no stop string can include, and True if one is complete. After a match,
                drops
            the rest of the text.
        """
        if not self._held and self._openings.isdisjoint(text):
            return text, False  # the usual case
        text = self._held + text
        self._held = ""
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            _, start, self.matched = min(found)
            return text[:start], True
        held = self._length_to_hold(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """Return the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
