"""Writes the regular expressions of schemas so that llguidance compiles them.

Look-ahead is replaced by patterns that have to match besides. At the beginning of a pattern `(?=X)`
says that X matches there too, and `(?!X)` that it does not. The latter needs X's complement, which
is found for a text (`(?!abc)`) and for a text after anything (`(?!.*abc)`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from appliance.errors import RequestError

MAX_TEXT = 24  # characters of a text that must not come
MAX_CHARACTERS = 32 * 1024  # of an expression
_GROUP = re.compile(r"\(\?(?:=|!|<=|<!)")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SPECIAL = frozenset("\\^$.|?*+()[]{}/-&~#")
# A class that is not closed counts too, so that no character is read twice.
_CLASS = re.compile(r"\\.|\[\^(?P<names>\]?(?:\\.|[^\]\\]++)*+)(?P<end>\]?)", re.DOTALL)
_QUOTED = re.compile(r'"|\\\\')
_ANYTHING = "(?s:.*)"
_SOMETHING = "(?s:.+)"


def without_lookahead(pattern: str, place: tuple[str, ...]) -> list[str]:
    """Return patterns that all match where the pattern does, the main one first.

    Raises:
        RequestError: the pattern looks ahead elsewhere, behind itself, or for something that has no
            simple complement; `param` is the place.
    """
    if not _looks(pattern):
        return [pattern]
    why = (
        "look-ahead in a pattern is supported at its beginning, as in ^(?=.*[0-9])(?!.*ab);"
        " after (?! for a text, or a text after .*"
    )
    if not pattern.startswith("^"):
        raise RequestError(why, param=".".join(place))
    at, besides = 1, []
    while pattern.startswith(("(?=", "(?!"), at):
        end = _end_of_group(pattern, at)
        inner = pattern[at + 3 : end - 1]
        if pattern.startswith("(?=", at):
            found: list[str | None] = [f"^(?:{inner})"]
        else:
            found = [_never(one) for one in _alternatives(inner)]
        besides += [one for one in found if one is not None]
        if None in found or _looks(inner) or pattern.startswith(("*", "+", "?", "{"), end):
            raise RequestError(why, param=".".join(place))
        at = end
    rest = pattern[at:]
    if _looks(rest) or len(_alternatives(rest)) > 1:  # the look-ahead belongs to the first alone
        raise RequestError(why, param=".".join(place))
    return [f"^{rest}", *besides]


def _looks(pattern: str) -> bool:
    return any(_GROUP.match(pattern, at) for at, one in outside_classes(pattern) if one == "(")


def _alternatives(pattern: str) -> list[str]:
    """Split a pattern where it has alternatives as a whole."""
    depth, begin, found = 0, 0, []
    for at, one in outside_classes(pattern):
        depth += {"(": 1, ")": -1}.get(one, 0)
        if one == "|" and depth == 0:
            found.append(pattern[begin:at])
            begin = at + 1
    return [*found, pattern[begin:]]


def _end_of_group(pattern: str, begin: int) -> int:
    """Return where the group ends that begins at a place; the pattern's length if it does not."""
    depth = 0
    for at, one in outside_classes(pattern, begin):
        depth += {"(": 1, ")": -1}.get(one, 0)
        if depth == 0:
            return at + 1
    return len(pattern)


def outside_classes(pattern: str, at: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the characters that are neither escaped nor in a class, with their places."""
    in_class = False
    while at < len(pattern):
        one = pattern[at]
        if one == "\\":
            at += 2
            continue
        if in_class:
            in_class = one != "]"
        elif one == "[":
            in_class = True
        else:
            yield at, one
        at += 1


def _never(inner: str) -> str | None:
    """Return an expression of the texts at whose beginning another one does not match."""
    ends = inner.endswith("$") and not inner.endswith("\\$")
    follows = inner.startswith(".*")
    text = _plain_text(inner[2 if follows else 0 : -1 if ends else None])
    if text is None or len(text) > MAX_TEXT or (follows and ends):
        return None
    if not text:
        return r"^[^\s\S]" if not ends else r"^(?s:.)"
    if ends:
        return other_texts([text])
    return _without(text) if follows else _not_at_first(text)


def _plain_text(inner: str) -> str | None:
    """Return the text that an expression stands for; None if it is no plain text."""
    found, at = "", 0
    while at < len(inner):
        one = inner[at]
        if one == "\\":
            at += 1
            one = inner[at : at + 1]
            if one.isalnum():
                if one not in _ESCAPES:
                    return None
                one = _ESCAPES[one]
        elif one in "^$.|?*+()[]{}":
            return None
        found += one
        at += 1
    return found


def _not_at_first(text: str) -> str:
    """Return the expression of texts that do not begin with a text."""
    ways = []
    for at, one in enumerate(text):
        head = escaped(text[:at])
        ways += [head + "$", f"{head}[^{escaped(one)}]"]
    return exact_classes(f"^(?:{'|'.join(ways)})")


def _without(text: str) -> str | None:
    """Return the expression of texts whose first line does not hold a text of equal characters.

    A text of other characters needs more states than one expression shows plainly.
    """
    one = text[0]
    if any(other != one for other in text) or "\n" in text:
        return None
    most = len(text) - 1
    own, other = escaped(one), f"[^{escaped(one)}\\n\\r]"
    line = f"(?:{own}{{0,{most}}}{other})*{own}{{0,{most}}}"
    return exact_classes(f"^{line}(?:$|[\\n\\r])")


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


def escaped(text: str) -> str:
    """Return the expression of a text, for Rust's `regex`."""
    return "".join(f"\\{one}" if one in _SPECIAL else one for one in text)
