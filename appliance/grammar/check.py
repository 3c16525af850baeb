"""Finds a grammar's error and its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from appliance.errors import RequestError
from appliance.grammar.grammar import Grammar, GrammarKind, canonical_schema
from appliance.grammar.source import limits, source_of

MAX_TRIED = 2000  # subschemas tried while locating an error
MAX_MESSAGE = 400  # characters
_PLACED = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_NOTHING = "nsatisfiable"
_QUOTED = re.compile(r"\s+\d+ \| ")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
# Keywords with subschemas: by name, in a list, or one.
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (
    "properties", "patternProperties", "dependentSchemas", "dependencies", *_DEFINITIONS,
)  # fmt: skip
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = (
    "items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


class Problem(NamedTuple):
    """An error in a grammar.

    Attributes:
        place: in a schema, names and indices from the root to the invalid part.
        message: for people.
    """

    place: tuple[str, ...]
    message: str


def problem_of(grammar: Grammar, given: str | None = None) -> Problem | None:
    """Return a grammar's error, as far as it shows without a vocabulary; None if valid.

    Costs as much as compiling, and many times that on an error; for untrusted text call it in a
    limited process.

    Args:
        given: the client's schema, of whose places the problem speaks; None means the grammar's.
    """
    message = _why_refused(grammar)
    if message is None:
        return None
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        return Problem((), message)
    return _blame(json.loads(given or grammar.text), message)


def answer_of(request: Mapping[str, str]) -> dict[str, Any]:
    """Check an untrusted grammar, in a process of its own.

    Args:
        request: `kind` and `text` of a grammar; GBNF counts as Lark, and a schema is as given.

    Returns:
        `text` for the engine's compiler, or `refused` with the reason, and `place`.
    """
    grammar = Grammar(GrammarKind(request["kind"]), request["text"])
    try:
        if grammar.kind is GrammarKind.LARK:
            grammar = Grammar.lark(grammar.text)
        elif grammar.kind is GrammarKind.JSON_SCHEMA:
            grammar = Grammar(grammar.kind, canonical_schema(grammar.text))
    except RequestError as error:
        return {"refused": error.message, "place": [error.param] if error.param else []}
    problem = problem_of(grammar, request["text"])
    if problem is not None:
        return {"refused": problem.message, "place": problem.place}
    return {"text": grammar.text}


def in_words(message: str, kind: GrammarKind) -> str:
    """Map llguidance's message to the user's line numbers, without its quotes of the text."""
    found = _PLACED.match(message)
    if found:
        message = found[3]
    kept = []
    for line in message.splitlines():
        if _QUOTED.match(line):
            break
        kept.append(line.strip())
    text = " ".join(filter(None, kept)).removeprefix("failed to compile JSON schema: ")
    if "oneOf constraints are not supported" in text:
        text = "oneOf needs schemas of which no two can match the same value, plainly; use anyOf"
    if "NoExtensionBias" in text:
        text = "nothing obeys this: it refers to itself without end"
    if "Failed to generate regex for" in text:
        text = f"these bounds of a number are too large or have too many digits: {text}"
    if unknown := _UNIMPLEMENTED.match(text):
        text = f"not supported: {', '.join(json.loads(unknown[1]))}"
    if found and kind is GrammarKind.LARK:  # the first line of the source is not the user's
        text = f"line {int(found[1]) - 1}, column {found[2]}: {text}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _why_refused(grammar: Grammar) -> str | None:
    source = source_of(grammar)
    if grammar.kind is GrammarKind.LARK and "<" in grammar.text:  # may name a token of the model's
        failed, messages = LLMatcher.validate_grammar_with_warnings(source, limits=limits())
        return in_words(messages[0], grammar.kind) if failed else None
    matcher = LLMatcher(_bytes(), source, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # some limits, and loops of references, show only here
    return in_words(matcher.get_error(), grammar.kind) if matcher.is_error() else None


@cache
def _bytes() -> LLTokenizer:
    """Return a vocabulary of all bytes, with which every text can be written."""
    return LLTokenizer("byte")


def _blame(schema: Any, message: str) -> Problem:
    """Find the innermost part of a schema that does not compile by itself, and its message."""
    if not isinstance(schema, Mapping):
        return Problem((), message)
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    place: tuple[str, ...] = ()
    culprit = schema
    for inner, part in islice(_parts(schema, ()), MAX_TRIED):
        if inner[: len(place)] == place:
            why = _why_part(part, definitions)
            # What nothing obeys may be left out, so it is at fault only if that is the error.
            if why is not None and (_NOTHING not in why or _NOTHING in message):
                place, culprit, message = inner, part, why
    for key in culprit:
        rest = {name: value for name, value in culprit.items() if name != key}
        if key not in _DEFINITIONS and _why_part(rest, definitions) is None:
            return Problem((*place, key), message)
    return Problem(place, message)


def _why_part(part: Mapping[str, Any], definitions: Mapping[str, Any]) -> str | None:
    """Return the error in a part itself, not in a definition that it refers to."""
    lenient = {
        key: dict.fromkeys(value, True) if isinstance(value, Mapping) else value
        for key, value in definitions.items()
        if key not in part or part[key] is value
    }
    try:
        return _why_refused(Grammar.json_schema({**part, **lenient}))
    except RequestError:  # of the part alone: as a whole the schema could be lowered
        return None


def _parts(schema: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every subschema with its place, outer ones first."""
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            for name, inner in value.items():
                yield from _parts(inner, (*place, key, name))
        elif key in _IN_LISTS and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _parts(inner, (*place, key, str(index)))
        elif key in _SINGLE:
            yield from _parts(value, (*place, key))
