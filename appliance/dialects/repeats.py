"""Detects repeated calls in an answer: small models that must call get stuck in them."""

from __future__ import annotations

from appliance.dialects.parts import CallArguments, CallBegin


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
