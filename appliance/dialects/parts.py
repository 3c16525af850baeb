"""What an answer is made of, and the list that a parser writes it to."""

from __future__ import annotations

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for whoever asked."""

    text: str


class Thought(msgspec.Struct, frozen=True, gc=False):
    """Text of the model to itself."""

    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """A tool is called; its arguments follow."""

    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the arguments of the latest call: JSON, once all pieces are together."""

    text: str


Part = Content | Thought | CallBegin | CallArguments


class Output:
    """The parts of one answer, as a parser finds them.

    White space that only separates is left out: around thoughts, and around calls. The same text
    gives the same parts, joined, however it was cut.

    Args:
        one_call: ignore all that follows the first call.
    """

    def __init__(self, *, one_call: bool = False) -> None:
        self._one_call = one_call
        self._parts: list[Part] = []
        self._kind: type[Part] | None = None
        self._bare = False  # nothing but white space has come since the kind changed
        self._space = ""  # at the end of what came; what follows decides about it
        self.ended = False
        self.calls = 0  # that have begun

    def take(self) -> list[Part]:
        """The parts since the last time."""
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        """Add text for whoever asked."""
        self._text(Content, text)

    def thought(self, text: str) -> None:
        """Add text of the model to itself."""
        self._text(Thought, text)

    def begin_thought(self) -> None:
        """What was content before is over, even if the thought stays empty."""
        if self._kind is not Thought:
            self._kind, self._bare, self._space = Thought, True, ""

    def begin_call(self, name: str) -> None:
        """Add a call."""
        if not self.ended:
            self._kind, self._space = CallBegin, ""
            self.calls += 1
            self._parts.append(CallBegin(name))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the latest call."""
        if text and not self.ended:
            self._append(CallArguments, text)

    def end_call(self) -> None:
        """Say that the latest call is complete."""
        self.ended = self.ended or self._one_call

    def close(self) -> None:
        """Add what was held back, once no more will come."""
        if self._kind is Content and not self._bare and not self.ended and self._space:
            self._append(Content, self._space)

    def _text(self, kind: type[Content | Thought], text: str) -> None:
        if self.ended or not text:
            return
        if self._kind is not kind:
            self._bare = kind is Thought or self._kind is not None
            self._kind, self._space = kind, ""
        if self._bare:
            text = text.lstrip()
            if not text:
                return
            self._bare = False
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._append(kind, shown)

    def _append(self, kind: type[Content | Thought | CallArguments], text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, kind):
            self._parts[-1] = kind(last.text + text)
        else:
            self._parts.append(kind(text))
