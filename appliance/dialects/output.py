"""The parts of an answer: thoughts, content and calls, as a parser finds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Thought(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    """The beginning of a call; its arguments follow."""

    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of the latest call's arguments; all pieces together are JSON."""

    text: str


Part = Content | Thought | CallBegin | CallArguments


class Output:
    """The parts of one answer, as a parser finds them.

    Drops white space around thoughts and calls. The same text gives the same joined parts however
    it was split.

    Args:
        one_call: ignore everything after the first call.
        ends_on_repeat: ignore a repeated call and everything after it.
    """

    def __init__(self, *, one_call: bool = False, ends_on_repeat: bool = False) -> None:
        self._one_call = one_call
        self._repeats = Repeats() if ends_on_repeat else None
        self._parts: list[Part] = []
        self._texts: list[str] = []  # of the last part, which has none of its own meanwhile
        self._kind: type[Part] | None = None
        self._bare = False  # only white space since the kind changed
        self._space: list[str] = []  # trailing white space; the next text decides about it
        self.ended = False

    def take(self) -> list[Part]:
        """Return and clear the parts since the last call."""
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        self._text(Content, text)

    def thought(self, text: str) -> None:
        self._text(Thought, text)

    def begin_thought(self) -> None:
        """End the content before a thought, even one that stays empty."""
        if self._kind is not Thought:
            self._kind, self._bare, self._space = Thought, True, []

    def begin_call(self, name: str) -> None:
        if not self.ended:
            self._kind, self._space = CallBegin, []
            self._add(self._repeats.begin(name) if self._repeats else [CallBegin(name)])

    def arguments(self, text: str) -> None:
        if text and not self.ended:
            self._add(self._repeats.add(text) if self._repeats else [CallArguments(text)])

    def end_call(self) -> None:
        if self._repeats and not self.ended:
            self._add(self._repeats.end())
            self.ended = self._repeats.found
        self.ended = self.ended or self._one_call

    def close(self) -> None:
        """Add held-back white space at the end."""
        if self._kind is Content and not self._bare and not self.ended and self._space:
            self._add([Content("".join(self._space))])

    def _text(self, kind: type[Content | Thought], text: str) -> None:
        if self.ended or not text:
            return
        if self._kind is not kind:
            self._bare = kind is Thought or self._kind is not None
            self._kind, self._space = kind, []
        if self._bare:
            text = text.lstrip()
            if not text:
                return
            self._bare = False
        shown = text.rstrip()
        if shown:
            self._add([kind("".join([*self._space, shown]))])
            self._space.clear()
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def _add(self, parts: Iterable[Part]) -> None:
        """Add parts, merging those that continue the last one."""
        for part in parts:
            last = self._parts[-1] if self._parts else None
            if isinstance(part, CallBegin) or type(last) is not type(part):
                self._join()
                self._parts.append(part)
            if not isinstance(part, CallBegin):
                self._texts.append(part.text)

    def _join(self) -> None:
        if self._texts and not isinstance(last := self._parts[-1], CallBegin):
            self._parts[-1] = type(last)("".join(self._texts))
        self._texts.clear()


class Repeats:
    """Holds a call back while it equals an earlier one.

    Attributes:
        found: a call repeated an earlier one.
    """

    def __init__(self) -> None:
        self.found = False
        self._earlier: list[tuple[str, str]] = []  # name and raw arguments
        self._name = ""
        self._texts: list[str] = []  # the call's arguments so far
        self._length = 0  # of them
        self._equal: list[str] = []  # arguments of earlier calls that begin like them
        self._held = False

    def begin(self, name: str) -> list[CallBegin | CallArguments]:
        """Begin a call; return the parts to emit."""
        self._name, self._length = name, 0
        self._texts.clear()
        self._equal = [text for earlier, text in self._earlier if earlier == name]
        self._held = bool(self._equal)
        return [] if self._held else [CallBegin(name)]

    def add(self, text: str) -> list[CallBegin | CallArguments]:
        """Add to the call's arguments; return the parts to emit."""
        self._texts.append(text)
        if not self._held:
            return [CallArguments(text)]
        self._equal = [one for one in self._equal if one.startswith(text, self._length)]
        self._length += len(text)
        return [] if self._equal else self._release()

    def end(self) -> list[CallBegin | CallArguments]:
        """End the call; return the parts to emit."""
        call = self._name, "".join(self._texts)
        if self._held and call in self._earlier:
            self.found = True
            return []
        self._earlier.append(call)
        return self._release() if self._held else []

    def _release(self) -> list[CallBegin | CallArguments]:
        self._held = False
        text = "".join(self._texts)
        arguments = [CallArguments(text)] if text else []
        return [CallBegin(self._name), *arguments]
