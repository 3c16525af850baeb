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
        self._name = self._text = ""
        self._held = False

    def begin(self, name: str) -> list[CallBegin | CallArguments]:
        """Begin a call; return the parts to emit."""
        self._name, self._text = name, ""
        self._held = self._may_repeat
        return [] if self._held else [CallBegin(name)]

    def add(self, text: str) -> list[CallBegin | CallArguments]:
        """Add to the call's arguments; return the parts to emit."""
        self._text += text
        if not self._held:
            return [CallArguments(text)]
        return [] if self._may_repeat else self._release()

    def end(self) -> list[CallBegin | CallArguments]:
        """End the call; return the parts to emit."""
        call = self._name, self._text
        if self._held and call in self._earlier:
            self.found = True
            return []
        self._earlier.append(call)
        return self._release() if self._held else []

    @property
    def _may_repeat(self) -> bool:
        return any(
            name == self._name and text.startswith(self._text) for name, text in self._earlier
        )

    def _release(self) -> list[CallBegin | CallArguments]:
        self._held = False
        arguments = [CallArguments(self._text)] if self._text else []
        return [CallBegin(self._name), *arguments]
