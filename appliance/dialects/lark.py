"""A grammar in Lark's notation, put together from the marks and schemas of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from appliance.grammar.grammar import embedded

ANY_TEXT = r"/(.|\n)*/"
_SPECIAL = set("\\^$.|?*+()[]{}/")


class Lark:
    """Collects rules.

    Args:
        control: ids of control tokens by their text: they stand in no text.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._rules: dict[str, str] = {}

    def rule(self, content: str, options: str = "") -> str:
        """The name of a rule with that content, the same one for the same content."""
        for name, known in self._rules.items():
            if known == f"{options}: {content}":
                return name
        name = f"r{len(self._rules)}"
        self._rules[name] = f"{options}: {content}"
        return name

    def mark(self, text: str) -> str:
        """A text that is a control token, or else just a text; nothing for none."""
        if text in self._control:
            return f"<[{self._control[text]}]>"
        return json.dumps(text) if text else ""

    def marks(self, *texts: str) -> str:
        """Several, one after the other."""
        return " ".join(filter(None, map(self.mark, texts)))

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that obeys a schema."""
        return self.rule(embedded(schema))

    def until(self, mark: str) -> str:
        """Any text up to a mark, the mark included."""
        if mark in self._control:
            return f"{self.rule(ANY_TEXT)} {self.mark(mark)}"
        return self.rule(rf"/(.|\n)*{_pattern(mark)}/", "[lazy]")

    def without(self, mark: str) -> str:
        """Any text that does not have a mark in it."""
        if mark in self._control:
            return self.rule(ANY_TEXT)
        name = f"WITHOUT{len(self._rules)}"
        self._rules[name] = rf": {ANY_TEXT} & ~/(.|\n)*{_pattern(mark)}(.|\n)*/"
        return name

    def text(self, start: str) -> str:
        """The grammar.

        Args:
            start: what an answer consists of.
        """
        rules = "\n".join(name + content for name, content in self._rules.items())
        return f"start: {start}\n{rules}\n"


def _pattern(text: str) -> str:
    """An expression that matches that text."""
    escaped = "".join(f"\\{c}" if c in _SPECIAL else c for c in text)
    return escaped.replace("\n", r"\n")
