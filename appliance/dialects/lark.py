"""Builds a Lark grammar from the marks and schemas of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from appliance.errors import RequestError
from appliance.grammar.grammar import MAX_TEXT, embedded

_ANYTHING = r"(.|\n)*"
ANY_TEXT = f"/{_ANYTHING}/"
_SPECIAL = set("\\^$.|?*+()[]{}/")
# Characters written for one grammar, equal rules included: a schema can name a part of itself
# again and again, so that what it stands for grows without limit.
MAX_WRITTEN = 2 * MAX_TEXT


class Lark:
    """Collects rules.

    Args:
        control: ids of control tokens by text; plain text never contains one.
    """

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        self._rules: dict[str, str] = {}  # names by content
        self._written = 0

    def spend(self, characters: int) -> None:
        """Count work on the grammar.

        Raises:
            RequestError: the tools need too much of it.
        """
        self._written += 1 + characters
        if self._written > MAX_WRITTEN:
            raise RequestError(
                f"the schemas make a grammar of more than {MAX_WRITTEN:,} characters; make them "
                "smaller, or name fewer parts by $ref",
                param="tools",
            )

    def rule(self, content: str, options: str = "") -> str:
        """Add a rule and return its name; equal content shares one rule."""
        return self._named("r", f"{options}: {content}")

    def mark(self, text: str) -> str:
        """Return the terminal of a control token or of plain text; "" for no text."""
        self.spend(len(text))
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
        return self._named("TEXT", f": {content}")

    def _named(self, kind: str, content: str) -> str:
        self.spend(len(content))
        # A rule and a terminal can have the same content.
        return self._rules.setdefault(kind + content, f"{kind}{len(self._rules)}")

    def members(self, rules: Mapping[str, str], required: Collection[str], separator: str) -> str:
        """Return an expression for an object's members: the required ones, then any others.

        Args:
            rules: of the members, by key.
        """
        comma = self.mark(separator)
        needed = frozenset(name for name in required if isinstance(name, str))
        first = [rule for key, rule in rules.items() if key in needed]
        others = [rule for key, rule in rules.items() if key not in needed]
        if first:
            rest = " ".join(f"({comma} {rule})?" for rule in others)
            return f"{f' {comma} '.join(first)} {rest}"
        # The first one present has no separator before it; each rule ends with the next one's
        # rest, so that the text grows with the number of members and not with its square.
        choices, rest = [], ""
        for rule in reversed(others):
            choices.append(f"{rule} {rest}")
            rest = self.rule(f"({comma} {rule})? {rest}")
        return f"({' | '.join(reversed(choices))})?" if choices else ""

    def text(self, start: str) -> str:
        self.spend(len(start))
        rules = "\n".join(
            name + content.removeprefix(name.rstrip("0123456789"))
            for content, name in self._rules.items()
        )
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
