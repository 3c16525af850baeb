"""Matches names of linears with the expressions of an adapter, for some seconds and no longer.

An expression of a few characters can take hours on a short name. `re`, by which PEFT reads them,
cannot be stopped; `regex` reads the same language and can.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from appliance.errors import AdapterError

if TYPE_CHECKING:
    from pathlib import Path

    import regex

SECONDS = 5.0  # of a processor, for all expressions and names of an adapter
MAX_CHARACTERS = 65_536  # of an expression; those that list every linear have some thousands
_SHOWN = 100


class NamePatterns:
    """Expressions of one adapter.

    Args:
        path: where they stand, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._left = SECONDS
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def match(self, pattern: str, name: str, *, whole: bool = False) -> regex.Match[str] | None:
        """Match a name from its beginning.

        Args:
            whole: the match must reach the end.

        Raises:
            AdapterError: the pattern is no regular expression, or takes too long.
        """
        compiled = self.compile(pattern)
        matches = compiled.fullmatch if whole else compiled.match
        begin = time.thread_time()
        try:
            found = matches(name, timeout=self._left)
        except TimeoutError:
            found, self._left = None, 0.0
        self._spend(pattern, begin)
        return found

    def compile(self, pattern: str) -> regex.Pattern[str]:
        """Compile a pattern, or raise AdapterError."""
        import regex

        found = self._compiled.get(pattern)
        if found is not None:
            return found
        if len(pattern) > MAX_CHARACTERS:
            raise self._wrong(pattern, f"it has more than {MAX_CHARACTERS} characters")
        begin = time.thread_time()
        try:
            found = self._compiled[pattern] = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as error:
            raise self._wrong(pattern, f"this is no regular expression: {error}") from None
        self._spend(pattern, begin)
        return found

    def _spend(self, pattern: str, begin: float) -> None:
        self._left -= time.thread_time() - begin
        if self._left <= 0:
            why = f"the adapter's patterns take more than {SECONDS:g} s to match"
            raise self._wrong(pattern, why)

    def _wrong(self, pattern: str, why: str) -> AdapterError:
        shown = repr(pattern[:_SHOWN]) + ("..." if len(pattern) > _SHOWN else "")
        return AdapterError(
            f"{self._path} has the pattern {shown}; {why}; name the linears in a list instead"
        )
