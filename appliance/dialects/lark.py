"""Builds a grammar in Lark's notation from the marks and schemas of calls."""

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
        control: ids of control tokens by their text; they occur in no plain text.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._rules: dict[str, str] = {}

    def rule(self, content: str, options: str = "") -> str:
        """Return the name of a rule; equal content has one rule."""
        for name, known in self._rules.items():
            if known == f"{options}: {content}":
                return name
        name = f"r{len(self._rules)}"
        self._rules[name] = f"{options}: {content}"
        return name

    def mark(self, text: str) -> str:
        """Return the terminal of a control token or of plain text; empty for no text."""
        if text in self._control:
            return f"<[{self._control[text]}]>"
        return json.dumps(text) if text else ""

    def marks(self, *texts: str) -> str:
        """Return the sequence of several marks."""
        return " ".join(filter(None, map(self.mark, texts)))

    def schema(self, schema: Mapping[str, Any]) -> str:
        """Return the rule of JSON under a schema."""
        return self.rule(embedded(schema))

    def until(self, mark: str) -> str:
        """Return the expression of any text up to and including a mark."""
        if mark in self._control:
            return f"{self.rule(ANY_TEXT)} {self.mark(mark)}"
        return self.rule(rf"/(.|\n)*{_pattern(mark)}/", "[lazy]")

    def without(self, mark: str) -> str:
        """Return the rule of any text without a mark."""
        if mark in self._control:
            return self.rule(ANY_TEXT)
        return self._terminal(rf"/{_ANYTHING}/ & ~/{_ANYTHING}{_pattern(mark)}{_ANYTHING}/")

    def obeying(self, expressions: Iterable[str], mark: str) -> str:
        """Return the expression of a text that matches all patterns, up to and with a mark."""
        if mark in self._control:
            text = " & ".join(f"/{one}/" for one in expressions)
            return f"{self._terminal(text)} {self.mark(mark)}"
        end = _pattern(mark)
        text = " & ".join(f"/({one}){end}/" for one in expressions)
        # Without "lazy" the text would match greedily, and take part of a mark.
        return self.rule(f"{text} & ~/{_ANYTHING}{end}(.|\n)+/", "[lazy]")

    def _terminal(self, content: str) -> str:
        for name, known in self._rules.items():
            if known == f": {content}":
                return name
        name = f"TEXT{len(self._rules)}"
        self._rules[name] = f": {content}"
        return name

    def members(self, rules: Mapping[str, str], required: Collection[str], separator: str) -> str:
        """Return the expression of an object's members: the required ones, then any of the others.

        Args:
            rules: of the members, by key.
            required: keys of required members.
            separator: between two members.
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
        """Return the grammar.

        Args:
            start: body of the start rule.
        """
        rules = "\n".join(name + content for name, content in self._rules.items())
        return f"start: {start}\n{rules}\n"


def _pattern(text: str) -> str:
    """Return an expression that matches a text."""
    escaped = "".join(f"\\{c}" if c in _SPECIAL else c for c in text)
    return escaped.replace("\n", r"\n")


def anywhere(pattern: str) -> str:
    """Return an expression for whole texts that contain a pattern of JSON Schema.

    As in llguidance, an anchor counts at either end of the pattern only.
    """
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = _unslashed(pattern[begins : len(pattern) - ends])
    return f"{'' if begins else _ANYTHING}({inner}){'' if ends else _ANYTHING}"


def _unslashed(pattern: str) -> str:
    """Escape slashes and line breaks, which would end an expression in Lark's notation."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern).replace("\n", r"\n")
