"""Turns a Lark grammar into one regular expression, for texts inside a JSON string.

A grammar's terminals know nothing of JSON's escapes, an expression of a string does. So rules are
written out where they are used; a rule that holds itself at one end is a repetition, and one that
nests in itself is refused. Every way to split a text counts, as in Lark's Earley parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from appliance.errors import RequestError
from appliance.grammar.patterns import outside_classes

MAX_TEXT = 64 * 1024  # characters of a grammar, and of its expression
MAX_WRITTEN = 16 * MAX_TEXT
_TOKENS = re.compile(
    r"""
      (?P<space>\s+|//[^\n]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[imslux]*)
    | (?P<name>[!?]?_?[a-zA-Z][a-zA-Z0-9_]*)
    | (?P<number>\d+)
    | (?P<sign>->|\.\.|[:|()\[\]*+?~.,{}]|%[a-z]+)
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_EXPONENT = "[eE][+-]?[0-9]+"
_FLOAT = rf"(?:[0-9]+{_EXPONENT}|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:{_EXPONENT})?)"
_NUMBER = rf"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:{_EXPONENT})?"
# The terminals of Lark's library `common`, by name.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}


def regular(grammar: str) -> str:
    """Return the expression of all texts that a Lark grammar's rule `start` produces.

    Raises:
        RequestError: the grammar is invalid or too long, nests without limit, or uses a part of
            Lark that is not known here.
    """
    try:
        return _Grammar(_tokens(grammar)).expression()
    except RecursionError:
        raise RequestError("the grammar is nested too deeply") from None


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(grammar: str) -> list[_Token]:
    if len(grammar) > MAX_TEXT:
        raise RequestError(f"the grammar has more than {MAX_TEXT} characters")
    found, at, line = [], 0, 1
    while at < len(grammar):
        one = _TOKENS.match(grammar, at)
        if one is None or one.lastgroup is None:
            part = grammar[at : at + 20].split("\n")[0]
            raise RequestError(f"line {line}: {part!r} is not known here")
        if one.lastgroup != "space":
            found.append(_Token(one.lastgroup, one[0], line))
        line += one[0].count("\n")
        at = one.end()
    return found


@dataclass(slots=True)
class _Part:
    """A piece of a rule: an expression, a rule's name, or a repeated choice of sequences."""

    text: str = ""
    name: str = ""
    choices: list[list[_Part]] = field(default_factory=list)
    repeat: str = ""


class _Grammar:
    """Reads the rules, and writes them out from the first one on."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._rules: dict[str, list[list[_Part]]] = {}
        self._ignored: list[list[list[_Part]]] = []
        self._open: list[str] = []  # rules that are being written out
        self._known: dict[str, str] = {}
        self._written = 0  # characters, those of parts within parts counted again
        self._between = ""  # what may stand after each terminal of a rule
        while self._at < len(tokens):
            self._statement()

    def expression(self) -> str:
        if "start" not in self._rules:
            raise RequestError("the grammar has no rule start")
        ignored = [self._choice(one, inside="ignore") for one in self._ignored]
        self._between = f"(?:{'|'.join(ignored)})*" if ignored else ""
        return self._rule("start")

    # Reading

    def _peek(self, ahead: int = 0) -> _Token:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else _Token("end", "", 0)

    def _next(self, *texts: str) -> _Token:
        token = self._peek()
        if texts and token.text not in texts:
            raise RequestError(f"line {token.line}: {token.text!r} instead of {' or '.join(texts)}")
        self._at += 1
        return token

    def _statement(self) -> None:
        token = self._next()
        if token.text == "%ignore":
            self._ignored.append(self._alternatives())
        elif token.text == "%import":
            self._import()
        elif token.kind == "name":
            if self._peek().text == ".":  # a priority, which decides between readings only
                self._at += 2
            self._next(":")
            name = token.text.lstrip("!?")
            if name in self._rules:
                raise RequestError(f"line {token.line}: {name} is defined twice")
            self._rules[name] = self._alternatives()
        else:
            raise RequestError(f"line {token.line}: {token.text!r} is not known here")

    def _import(self) -> None:
        library = self._next()
        names = []
        if self._peek().text == "(":
            self._next("(")
            while (token := self._next()).text != ")":
                if token.text != ",":
                    names.append((token.text, token.text))
                if token.kind == "end":
                    break
        else:
            self._next(".")
            name = own = self._next().text
            if self._peek().text == "->":
                self._next("->")
                own = self._next().text
            names.append((name, own))
        for name, own in names:
            if library.text != "common" or name not in _COMMON:
                raise RequestError(
                    f"line {library.line}: {library.text}.{name} cannot be imported; known are"
                    f" {', '.join(_COMMON)} of common"
                )
            self._rules[own] = [[_Part(_COMMON[name])]]

    def _alternatives(self) -> list[list[_Part]]:
        found = []
        if self._peek().text == "|":
            self._next("|")
        while True:
            found.append(self._sequence())
            if self._peek().text != "|":
                return found
            self._next("|")

    def _sequence(self) -> list[_Part]:
        found: list[_Part] = []
        while not self._ends():
            found.append(self._item())
        if self._peek().text == "->":  # an alias
            self._at += 2
        return found

    def _ends(self) -> bool:
        token, after = self._peek(), self._peek(1).text
        if token.kind == "name" and (after == ":" or (after == "." and self._peek(3).text == ":")):
            return True  # the next rule
        return token.kind == "end" or token.text in ("|", ")", "]", "->") or token.text[0] == "%"

    def _item(self) -> _Part:
        token = self._next()
        part = _Part()
        if token.kind == "string" and self._peek().text == "..":
            self._next("..")
            part.text = f"[{_escaped(_plain(token))}-{_escaped(_plain(self._next()))}]"
        elif token.kind == "string":
            part.text = _escaped(_plain(token))
            if token.text.endswith("i"):
                part.text = f"(?i:{part.text})"
        elif token.kind == "regex":
            part.text = _flagged(token)
        elif token.kind == "name":
            part.name = token.text
        elif token.text in ("(", "["):
            part.choices = self._alternatives()
            self._next(")" if token.text == "(" else "]")
            part.repeat = "" if token.text == "(" else "?"
        else:
            raise RequestError(f"line {token.line}: {token.text!r} is not known here")
        return self._repeated(part)

    def _repeated(self, part: _Part) -> _Part:
        sign = self._peek().text
        if sign in ("*", "+", "?"):
            self._next()
            repeat = sign
        elif sign == "~":
            self._next()
            least = most = self._next().text
            if self._peek().text == "..":
                self._next()
                most = self._next().text
            repeat = f"{{{least},{most}}}"
        elif sign == "{":
            self._next()
            repeat = "{"
            while (token := self._next()).text != "}" and token.kind != "end":
                repeat += token.text
            repeat += "}"
        else:
            return part
        return _Part(choices=[[part]], repeat=repeat)

    # Writing

    def _rule(self, name: str) -> str:
        if name not in self._rules:
            raise RequestError(f"the grammar has no rule {name}")
        if name in self._open:
            raise RequestError(
                f"the rule {name} nests in itself without limit, which cannot be enforced for a "
                "text inside a call; write it out to the depth that is needed"
            )
        if name not in self._known:
            self._open.append(name)
            self._known[name] = self._choice(_unrolled(name, self._rules[name]), inside=name)
            self._open.pop()
        return self._known[name]

    def _choice(self, choices: list[list[_Part]], inside: str) -> str:
        texts = ["".join(self._part(one, inside) for one in sequence) for sequence in choices]
        found = f"(?:{'|'.join(texts)})"
        self._written += len(found)
        if len(found) > MAX_TEXT or self._written > MAX_WRITTEN:
            raise RequestError(f"the grammar is too large: {MAX_TEXT} characters written out")
        return found

    def _part(self, part: _Part, inside: str) -> str:
        # Nothing is ignored within a terminal, whose name is in capitals.
        between = "" if inside.strip("_")[:1].isupper() or inside == "ignore" else self._between
        if part.choices:
            return self._choice(part.choices, inside) + part.repeat
        if not part.name:
            return f"(?:{part.text}){between}"
        is_terminal = part.name.strip("_")[:1].isupper()
        return self._rule(part.name) + (between if is_terminal else "")


def _unrolled(name: str, choices: list[list[_Part]]) -> list[list[_Part]]:
    """Turn a rule that begins, or ends, with itself into a repetition."""
    for end in (0, -1):
        again = [one for one in choices if one and one[end].name == name]
        if not again:
            continue
        more = [one[1:] if end == 0 else one[:-1] for one in again]
        repeated = _Part(choices=more, repeat="*")
        others = [one for one in choices if not (one and one[end].name == name)]
        first = _Part(choices=others or [[_Part(r"[^\s\S]")]])
        return [[first, repeated] if end == 0 else [repeated, first]]
    return choices


def _plain(token: _Token) -> str:
    """Return the text that a string stands for."""
    if token.kind != "string":
        raise RequestError(f"line {token.line}: {token.text!r} instead of a string")
    inner = token.text.removesuffix("i")[1:-1]

    def unescaped(found: re.Match[str]) -> str:
        one = found[0]
        simple = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\f": "\f", "\\v": "\v"}
        return simple.get(one[:2]) or (one[1:] if len(one) == 2 else chr(int(one[2:], 16)))

    try:
        return _ESCAPE.sub(unescaped, inner)
    except (ValueError, OverflowError):
        raise RequestError(f"line {token.line}: {token.text[:40]} has no such character") from None


def _escaped(text: str) -> str:
    special = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f", "\v": r"\v"}
    return "".join(special.get(c) or (f"\\{c}" if c in "\\^$.|?*+()[]{}/-&~#" else c) for c in text)


def _flagged(token: _Token) -> str:
    """Return an expression with its flags; a dot leaves out line feeds alone, as in Python."""
    inner, _, flags = token.text[1:].rpartition("/")
    if "x" in flags:
        raise RequestError(f"line {token.line}: the flag x of an expression is not known here")
    dot = r"[\s\S]" if "s" in flags else r"[^\n]"
    places, depth = set(), 0
    for at, one in outside_classes(inner):
        depth += {"(": 1, ")": -1}.get(one, 0)
        if depth < 0:
            break
        if one == ".":
            places.add(at)
    if depth:
        raise RequestError(f"line {token.line}: {token.text[:40]} has an open parenthesis")
    text = "".join(dot if at in places else one for at, one in enumerate(inner))
    text = text.replace(r"\/", "/")
    return f"(?i:{text})" if "i" in flags else f"(?:{text})"
