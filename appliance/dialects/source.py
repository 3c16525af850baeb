"""Feeds streamed text to parsers written as if all of it were there.

A parser is a generator that pauses while the text so far is ambiguous. So its result does not
depend on how the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from appliance.dialects.output import Output

ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]


class MalformedCallError(Exception):
    """Text that looked like a call is none."""


class Source:
    """The text of one answer, and its parser's output.

    Attributes:
        thinking: True inside a thought.
    """

    def __init__(self, output: Output) -> None:
        self.output = output
        self.thinking = False
        self._text = ""
        self._at = 0
        self._mark: int | None = None  # where the attempt began, as far as it is in the text
        self._attempted: list[str] = []  # the attempt before that
        self._marked = False  # the attempt began with a mark
        self._closed = False
        self._starved = False  # the attempt ran out of text
        self._cut = self._must_call = False

    def feed(self, text: str) -> None:
        if self._mark is not None:
            self._attempted.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self, *, cut: bool = False, must_call: bool = False) -> None:
        """End the text.

        Args:
            cut: the answer was cut off, so half a mark is half a call instead of content.
            must_call: the answer must be a call, so a partial call is not content.
        """
        self._closed = True
        self._cut, self._must_call = cut or must_call, must_call

    # ---- attempts: text that may be a call, else content ----

    def attempt(self, opening: str) -> None:
        # The opening may have come with earlier texts.
        self._attempted, self._mark = [opening], self._at
        self._marked, self._starved = bool(opening), False

    def begin_call(self, name: str) -> None:
        """Decide that the attempt is a call."""
        self._mark = None
        self.output.begin_call(name)

    def drop_attempt(self) -> None:
        """Drop the attempt's text: neither a call nor content."""
        self._mark = None

    def give_up(self) -> None:
        """End a failed attempt: its text is content, or a broken call if one has begun.

        Drops an attempt that was cut off.
        """
        if self._mark is None:
            self.output.end_call()
            return
        if self._cut and self._starved and (self._marked or self._must_call):
            self._at = len(self._text)
        else:
            self._attempted.append(self._text[self._mark : self._at])
            self.output.content("".join(self._attempted))
        self._mark = None

    # ---- reading: every method pauses until the text is unambiguous ----

    def more(self) -> Steps[bool]:
        """Wait for more text; return False at the end."""
        length = len(self._text) - self._at
        while len(self._text) - self._at == length:
            if self._closed:
                self._starved = True
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character without consuming it; "" at the end."""
        while self._at >= len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def advance(self) -> str:
        """Consume and return the peeked character."""
        self._at += 1
        return self._text[self._at - 1]

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()).isspace():
            self._at += 1

    def literal(self, expected: str) -> Steps[bool]:
        """Consume a fixed text if it comes next; return True if it did."""
        while True:
            if self._text.startswith(expected, self._at):
                self._at += len(expected)
                return True
            short = len(self._text) - self._at < len(expected)
            if not (short and expected.startswith(self._text[self._at :])):
                return False
            if not (yield from self.more()):
                return False

    def closing(self, expected: str) -> Steps[bool]:
        """Consume white space and a fixed text; at the answer's end, part of it suffices."""
        yield from self.skip_space()
        if (yield from self.literal(expected)):
            return True
        short = len(self._text) - self._at < len(expected)
        if short and expected.startswith(self._text[self._at :]):  # at the end of the answer
            self._at = len(self._text)
        return False

    def scalar(self, ends: str) -> Steps[str]:
        """Consume and return text up to one of these characters, or to the end."""
        text = ""
        while (character := (yield from self.peek())) and character not in ends:
            text += self.advance()
        return text

    def collect(self, *markers: str) -> Steps[str]:
        """Consume and return text up to and including a marker, or raise MalformedCallError."""
        pieces: list[str] = []
        if (yield from self.until(markers, pieces.append)) is None:
            raise MalformedCallError
        return "".join(pieces)

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str | None]:
        """Pass on text up to the first of some markers, and consume the marker.

        Args:
            markers: none may be a prefix of another.
            emit: receives text once it is final.

        Returns:
            The marker, or None if the text ends first.
        """
        find = _one_of(markers).search
        while True:
            waits = self._cut or not self._closed
            held = self._first_beginning(markers) if waits else len(self._text)
            found = find(self._text, self._at)
            if found is not None and found.start() <= held:
                self._hand_on(found.start(), emit)
                self._at = found.end()
                return found.group()
            self._hand_on(held, emit)
            if not (yield from self.more()):
                if not self._cut:  # otherwise it holds back half a marker
                    self._hand_on(len(self._text), emit)
                self._at = len(self._text)
                return None

    def _hand_on(self, end: int, emit: Callable[[str], None]) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            emit(text)

    def _first_beginning(self, markers: tuple[str, ...]) -> int:
        """Return where a marker cut by the text's end begins, or the text's length."""
        length = len(self._text)
        longest = max(map(len, markers), default=1)
        for start in range(max(self._at, length - longest + 1), length):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return start
        return length


@lru_cache(maxsize=256)
def _one_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the expression that finds the first of some markers."""
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")
