"""Builds a Lark grammar from the marks and schemas of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from appliance.grammar.grammar import embedded

_ANYTHING = r"(.|\n)*"
ANY_TEXT = f"/{_ANYTHING}/"
_SPECIAL = set("\\^$.|?*+()[]{}/")


class Lark:
    """Collects rules.

    Args:
        control: ids of control tokens by text; plain text never contains one.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._rules: dict[str, str] = {}

    def rule(self, content: str, options: str = "") -> str:
        """Add a rule and return its name; equal content shares one rule."""
        for name, known in self._rules.items():
            if known == f"{options}: {content}":
                return name
        name = f"r{len(self._rules)}"
        self._rules[name] = f"{options}: {content}"
        return name

    def mark(self, text: str) -> str:
        """Return the terminal of a control token or of plain text; "" for no text."""
        if text in self._control:
            return f"<[{self._control[text]}]>"
        return json.dumps(text) if text else ""

    def marks(self, *texts: str) -> str:
        return " ".join(filter(None, map(self.mark, texts)))

    def schema(self, schema: Mapping[str, Any]) -> str:
        return self.rule(embedded(schema))

    def until(self, mark: str) -> str:
        """Return an expression for any text up to and including a mark."""
        if mark in self._control:
            return f"{self.rule(ANY_TEXT)} {self.mark(mark)}"
        return self.rule(rf"/(.|\n)*{_pattern(mark)}/", "[lazy]")

    def without(self, mark: str) -> str:
        """Return a rule for any text without a mark."""
        if mark in self._control:
            return self.rule(ANY_TEXT)
        return self._terminal(rf"/{_ANYTHING}/ & ~/{_ANYTHING}{_pattern(mark)}{_ANYTHING}/")

    def obeying(self, expressions: Iterable[str], mark: str) -> str:
        """Return an expression for a text that matches all patterns, up to and including a mark."""
        if mark in self._control:
            text = " & ".join(f"/{one}/" for one in expressions)
            return f"{self._terminal(text)} {self.mark(mark)}"
        end = _pattern(mark)
        text = " & ".join(f"/({one}){end}/" for one in expressions)
        # Without "lazy" the text matches greedily and takes part of a mark.
        return self.rule(f"{text} & ~/{_ANYTHING}{end}(.|\n)+/", "[lazy]")

    def _terminal(self, content: str) -> str:
        for name, known in self._rules.items():
            if known == f": {content}":
                return name
        name = f"TEXT{len(self._rules)}"
        self._rules[name] = f": {content}"
        return name

    def members(self, rules: Mapping[str, str], required: Collection[str], separator: str) -> str:
        """Return an expression for an object's members: the required ones, then any others.

        Args:
            rules: of the members, by key.
        """
        comma = self.mark(separator)
        first = [rule for key, rule in rules.items() if key in required]
        others = [rule for key, rule in rules.items() if key not in required]
        if first:
            rest = " ".join(f"({comma} {rule})?" for rule in others)
            return f"{f' {comma} '.join(first)} {rest}"
        # The first one present has no separator before it.
        choices = [
            f"{rule} " + " ".join(f"({comma} {later})?" for later in others[place + 1 :])
            for place, rule in enumerate(others)
        ]
        return f"({' | '.join(choices)})?" if choices else ""

    def text(self, start: str) -> str:
        rules = "\n".join(name + content for name, content in self._rules.items())
        return f"start: {start}\n{rules}\n"


def _pattern(text: str) -> str:
    escaped = "".join(f"\\{c}" if c in _SPECIAL else c for c in text)
    return escaped.replace("\n", r"\n")


def anywhere(pattern: str) -> str:
    """Return an expression for texts that contain a match of a JSON Schema pattern.

    As in llguidance, an anchor counts only at the ends of the pattern.
    """
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = _unslashed(pattern[begins : len(pattern) - ends])
    return f"{'' if begins else _ANYTHING}({inner}){'' if ends else _ANYTHING}"


def _unslashed(pattern: str) -> str:
    """Escape slashes and line breaks, which end an expression in Lark."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern).replace("\n", r"\n")
