"""Text that arrives in pieces, for parsers written as if all of it were there.

A parser is a generator: it pauses where the text so far does not decide, and goes on when there is
more. So its result cannot depend on how the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from appliance.dialects.output import Output

ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]


class MalformedCallError(Exception):
    """Text that looked like a call is none."""


class Source:
    """The text of one answer, and where its parser writes to.

    Attributes:
        output: the parts found.
        thinking: whether the parser is within a thought.
    """

    def __init__(self, output: Output) -> None:
        self.output = output
        self.thinking = False
        self._text = ""
        self._at = 0
        self._mark: int | None = None  # where an attempt began
        self._marked = False  # it began with a mark
        self._closed = False
        self._starved = False  # the attempt wanted more text than there is
        self._cut = self._must_call = False

    def feed(self, text: str) -> None:
        """Add text."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        if self._mark is not None:
            self._mark = 0

    def close(self, *, cut: bool = False, must_call: bool = False) -> None:
        """End the text.

        Args:
            cut: the model was not done, so half a mark is half a call and no content.
            must_call: the answer has to be a call, so whatever there is of one is no content.
        """
        self._closed = True
        self._cut, self._must_call = cut or must_call, must_call

    # ---- attempts: what may turn out to be no call, and then is content ----

    def attempt(self, opening: str) -> None:
        """Begin an attempt at the text just read."""
        self._mark = self._at - len(opening)
        self._marked, self._starved = bool(opening), False

    def begin_call(self, name: str) -> None:
        """It is a call."""
        self._mark = None
        self.output.begin_call(name)

    def drop_attempt(self) -> None:
        """Drop the text read since: it is neither a call nor content."""
        self._mark = None

    def give_up(self) -> None:
        """End an attempt: its text is content, or a broken call if one has begun.

        One that was cut short is neither: nothing of it is shown.
        """
        if self._mark is None:
            self.output.end_call()
            return
        if self._cut and self._starved and (self._marked or self._must_call):
            self._at = len(self._text)
        else:
            self.output.content(self._text[self._mark : self._at])
        self._mark = None

    # ---- reading; every method pauses until the text decides ----

    def more(self) -> Steps[bool]:
        """Wait for more text; False if none will come."""
        length = len(self._text) - self._at
        while len(self._text) - self._at == length:
            if self._closed:
                self._starved = True
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at >= len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def advance(self) -> str:
        """Read the character that was peeked at."""
        self._at += 1
        return self._text[self._at - 1]

    def skip_space(self) -> Steps[None]:
        """Read over white space."""
        while (yield from self.peek()).isspace():
            self._at += 1

    def literal(self, expected: str) -> Steps[bool]:
        """Read a fixed text if it is next."""
        while True:
            if self._text.startswith(expected, self._at):
                self._at += len(expected)
                return True
            if not expected.startswith(self._text[self._at :]):
                return False
            if not (yield from self.more()):
                return False

    def closing(self, expected: str) -> Steps[bool]:
        """Read a fixed text after white space, or the beginning of it at the end."""
        yield from self.skip_space()
        if (yield from self.literal(expected)):
            return True
        if expected.startswith(self._text[self._at :]):  # which is then the end
            self._at = len(self._text)
        return False

    def scalar(self, ends: str) -> Steps[str]:
        """Read up to one of these characters, which is left, or to the end."""
        text = ""
        while (character := (yield from self.peek())) and character not in ends:
            text += self.advance()
        return text

    def collect(self, *markers: str) -> Steps[str]:
        """Read up to a marker, and read that too.

        Raises:
            MalformedCallError: it does not come.
        """
        pieces: list[str] = []
        if (yield from self.until(markers, pieces.append)) is None:
            raise MalformedCallError
        return "".join(pieces)

    def until(self, markers: tuple[str, ...], emit: Callable[[str], None]) -> Steps[str | None]:
        """Hand on text up to the first of some markers, which is read, too.

        Args:
            markers: none is the beginning of another.
            emit: gets the text as it becomes certain.

        Returns:
            The marker; None if the text ends before.
        """
        openings = {marker[0] for marker in markers}
        while True:
            held = len(self._text)
            if not openings.isdisjoint(self._text[self._at :]):
                if self._cut or not self._closed:
                    held = self._first_beginning(markers)
                found = [(at, m) for m in markers if (at := self._text.find(m, self._at)) >= 0]
                if found and min(found)[0] <= held:
                    at, marker = min(found)
                    self._hand_on(at, emit)
                    self._at = at + len(marker)
                    return marker
            self._hand_on(held, emit)
            if not (yield from self.more()):
                if not self._cut:  # else what is held back is half a marker
                    self._hand_on(len(self._text), emit)
                self._at = len(self._text)
                return None

    def _hand_on(self, end: int, emit: Callable[[str], None]) -> None:
        if end > self._at:
            text, self._at = self._text[self._at : end], end
            emit(text)

    def _first_beginning(self, markers: tuple[str, ...]) -> int:
        """Return the place where a marker begins that the text's end cuts, or the text's length."""
        length = len(self._text)
        for start in range(max(self._at, length - max(map(len, markers)) + 1), length):
            if any(marker.startswith(self._text[start:]) for marker in markers):
                return start
        return length
