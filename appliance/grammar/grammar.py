"""A constraint on the text of an answer, in one of three forms that llguidance compiles.

Crosses the process boundary, so it is a msgspec struct. Imports neither torch nor llguidance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from appliance.errors import RequestError
from appliance.grammar.closed import close_objects
from appliance.grammar.lowering import lowered

MAX_TEXT = 256 * 1024  # characters: a coding agent's tools take a third of it
MAX_DEPTH = 64  # of a schema as JSON: each object in an object is two levels
MAX_CHOICES = 1024
_TOO_DEEP = f"the schema is nested too deeply; it may have {MAX_DEPTH} levels"

# White space between two JSON tokens: none, one space, or a line break with indentation. Without
# a limit, a small model fills its answer with spaces.
WHITESPACE = r" |\n {0,32}"


class GrammarKind(Enum):
    """The notation of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of Rust's regex crate, for the whole answer
    LARK = "lark"  # as llguidance reads it


class Grammar(msgspec.Struct, frozen=True):
    r"""Constrains the text of a sequence; equal grammars are compiled once.

    In Lark, `%json {...}` embeds a schema (see `embedded`), `<tool_call>` stands for the special
    token of that name and `<[151657]>` for the token of that id. Special tokens appear only where
    the grammar names them. Text before a call is therefore part of the grammar as well:

        start: TEXT (<tool_call> call </tool_call>)*
        TEXT: /(.|\n)*/
        call: %json {"type": "object"}

    Plain text triggers the rest by a rule marked `[lazy]`:

        start: intro call
        intro[lazy]: /(.|\n)*<function=/

    The answer may end where the grammar may, and ends at once where it must.

    Args:
        kind: how to read `text`.
        text: the schema, expression or grammar.
        after: id of the token that activates it, such as `</think>`; earlier tokens are free, and
            so is an answer without it. None constrains the answer from its beginning.

    Raises:
        RequestError: the text is too long.
    """

    kind: GrammarKind
    text: str
    after: int | None = None

    def __post_init__(self) -> None:
        _check_length(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Accept JSON under a schema, given as an object or as JSON text.

        Raises:
            RequestError: it is not a schema, is nested too deeply, or has a keyword that is not
                supported; `param` is the place of that.
        """
        try:
            return cls(GrammarKind.JSON_SCHEMA, canonical_schema(schema))
        except RequestError as error:
            if error.param is None:
                raise
            raise RequestError(f"{error.param}: {error.message}", param=error.param) from error

    @classmethod
    def schema_as_given(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Hold a schema of a client, which `check.answer_of` reads in a process with limits.

        Raises:
            RequestError: it is too long.
        """
        if isinstance(schema, str):
            return cls(GrammarKind.JSON_SCHEMA, schema)
        try:
            return cls(GrammarKind.JSON_SCHEMA, _compact(schema))
        except RecursionError:
            raise RequestError(_TOO_DEEP) from None

    @classmethod
    def json_object(cls) -> Grammar:
        """Accept any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Accept text that an expression matches entirely."""
        return cls(GrammarKind.REGEX, expression)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Accept one of several texts.

        Raises:
            RequestError: there are none, or too many.
        """
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise RequestError(f"{len(choices)} choices; there must be 1 to {MAX_CHOICES}")
        return cls(GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, choices)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Accept a grammar in Lark's notation or in GBNF, llama.cpp's.

        Raises:
            RequestError: it is invalid GBNF.
        """
        if "::=" not in text or len(text) > MAX_TEXT:
            return cls(GrammarKind.LARK, text)
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            return cls(GrammarKind.LARK, gbnf_to_lark(text))
        except Exception as error:  # of any kind: it is a simple program
            raise RequestError(f"this is no GBNF grammar: {error!r}") from error


def canonical_schema(schema: Mapping[str, Any] | bool | str) -> str:
    """Write a schema as compact JSON, keeping the order of properties, which answers follow.

    It has only keywords that the compiler knows, see `lowered`, and objects are closed, see
    `close_objects`.

    Raises:
        RequestError: it is not a schema, is too long, is nested too deeply, or has a keyword that
            is not supported.
    """
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"this is no JSON: {error}") from error
    if not isinstance(schema, (Mapping, bool)):
        raise RequestError("a schema is an object, true or false")
    _check_depth(schema)
    text = _compact(schema)
    _check_length(text)
    if not isinstance(schema, Mapping):
        return text
    simpler = lowered(schema)
    return _compact(close_objects(simpler, len(text)))


def embedded(schema: Mapping[str, Any] | bool | str) -> str:
    """Return a schema for use in a rule of a Lark grammar.

    Raises:
        RequestError: as for `canonical_schema`.
    """
    return f"%json {with_options(canonical_schema(schema))}"


def with_options(schema: str) -> str:
    """Set our JSON formatting in a canonical schema, over any that it names."""
    options = f'"x-guidance":{json.dumps({"whitespace_pattern": WHITESPACE})}'
    content = json.loads(schema)
    if content is True:
        content = {}
    elif content is False:
        return schema
    content.pop("x-guidance", None)
    if not content:
        return f"{{{options}}}"
    return f"{{{options},{json.dumps(content, separators=(',', ':'))[1:]}"


def _compact(schema: Mapping[str, Any] | bool) -> str:
    return json.dumps(schema, separators=(",", ":"))


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise RequestError(
            f"this has {len(text):,} characters; a grammar or schema may have {MAX_TEXT:,}"
        )


def _check_depth(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (Mapping, list))
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise RequestError(_TOO_DEEP)
