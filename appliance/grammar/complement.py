"""Expressions for the texts that an expression does not match."""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_CHARACTERS = 32 * 1024  # of an expression
_SPECIAL = frozenset("\\^$.|?*+()[]{}/-&~#")
# A class that is not closed counts too, so that no character is read twice.
_CLASS = re.compile(r"\\.|\[\^(?P<names>\]?(?:\\.|[^\]\\]++)*+)(?P<end>\]?)", re.DOTALL)
_QUOTED = re.compile(r'"|\\\\')
_ANYTHING = "(?s:.*)"
_SOMETHING = "(?s:.+)"


def escaped(text: str) -> str:
    """Return the expression of a text, for Rust's `regex`."""
    return "".join(f"\\{one}" if one in _SPECIAL else one for one in text)


def other_texts(texts: Collection[str]) -> str | None:
    """Return an anchored expression of all texts but these; None if it is too long.

    A text differs where it first leaves the tree of the given ones, or ends within it.
    """
    if sum(len(text) * (len(text) + 16) for text in texts) > MAX_CHARACTERS:
        return None
    following: dict[str, dict[str, None]] = {"": {}}  # characters after each beginning
    for text in texts:
        for place, character in enumerate(text):
            following.setdefault(text[:place], {})[character] = None
        following.setdefault(text, {})
    alternatives = []
    for beginning, characters in following.items():
        head = escaped(beginning)
        if beginning not in texts:
            alternatives.append(head)
        if characters:
            alternatives.append(f"{head}[^{escaped(''.join(characters))}]{_ANYTHING}")
        if not characters:
            alternatives.append(head + _SOMETHING)
    return exact_classes(f"^(?:{'|'.join(alternatives)})$")


def exact_classes(pattern: str) -> str:
    """Take U+0000 out of negated classes that name a quote or a backslash.

    Of a class with all control characters, llguidance lets JSON's escapes of both pass.
    """
    return _CLASS.sub(_without_nul, pattern)


def _without_nul(found: re.Match[str]) -> str:
    names = found["names"]
    if not found["end"] or not _QUOTED.search(names):
        return found[0]
    return f"[^\\x00{names}]"
