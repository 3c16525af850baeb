"""Python calls, `[f(a=1), g()]`: Llama 3.2 and 4 on request, and LFM2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.bare_values import as_json, escaped
from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

MAX_NESTING = 64
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class Pythonic(CallForm):
    """A list of calls with named arguments, between marks or at the beginning of an answer.

    Any answer can have brackets, so a list at the beginning must name a tool.

    Args:
        bare: models omit the marks.
    """

    def __init__(self, name: str, opening: str, closing: str, *, bare: bool) -> None:
        self.name = name
        self.marks = (opening, closing)
        self._bare = bare
        self._opening, self._closing = self.marks
        self.opening = "" if bare else opening

    def recognises(self, text: str, tool: str) -> bool:
        return f"{self.opening}[{tool}(" in text

    def write(self, name: str, arguments: str) -> str:
        values = json.loads(arguments)
        if not isinstance(values, dict):
            raise MalformedCallError
        written = ", ".join(f"{key}={_written(value)}" for key, value in values.items())
        return f"{self.opening}[{name}({written})]{self._tail}"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        values = {
            key: f"{lark.mark(key + '=')} {_value_rule(one, shared, lark)}"
            for key, one in (schema.get("properties") or {}).items()
        }
        inner = lark.members(values, schema.get("required") or (), ", ")
        return f"{lark.mark(f'[{name}(')} {inner} {lark.marks(')]', self._tail)}"

    def plain(self, lark: Lark, text: str | None = None) -> str:
        """Return the grammar of an answer that does not begin like a call."""
        if self._bare:
            return text or lark.rule(r"/\s*([^\[\s](.|\n)*)?/")
        return super().plain(lark, text)

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_calls(opening: str) -> Steps[None]:
            yield from read_list(source, None)
            yield from source.closing(self._closing)

        if self._bare:
            source.attempt("")
            try:
                yield from read_list(source, schemas)
            except MalformedCallError:
                source.give_up()
            else:
                source.drop_attempt()
        yield from read_content(source, (self._opening,), read_calls)

    @property
    def _tail(self) -> str:
        return "" if self._bare else self._closing


def read_list(source: Source, schemas: Schemas | None) -> Steps[None]:
    """Read a list of calls.

    Args:
        source: positioned at the list.
        schemas: of the tools, if the list must begin with a tool's name.

    Raises:
        MalformedCallError: it is not a list of calls, or breaks off.
    """
    yield from source.skip_space()
    if not (yield from source.literal("[")):
        raise MalformedCallError
    while True:
        yield from source.skip_space()
        name = (yield from source.scalar("([]{}=,\"'\n")).strip()
        if not name or not (schemas is None or name in schemas):
            raise MalformedCallError
        if not (yield from source.literal("(")):
            raise MalformedCallError
        source.begin_call(name)
        yield from _read_items(source, "(", 0)
        source.output.end_call()
        yield from source.skip_space()
        if not (yield from source.literal(",")):
            break
        source.attempt("")
    yield from source.closing("]")


def _read_items(source: Source, opening: str, nesting: int) -> Steps[None]:
    """Read the text between brackets (arguments, a dict or a list) and write it as JSON."""
    emit, closing = source.output.arguments, _CLOSING[opening]
    if nesting > MAX_NESTING:
        raise MalformedCallError
    emit("[" if opening == "[" else "{")
    separator = ""
    while True:
        yield from source.skip_space()
        if (yield from source.literal(closing)):
            emit("]" if opening == "[" else "}")
            return
        if separator and not (yield from source.literal(",")):
            raise MalformedCallError
        yield from source.skip_space()
        if separator and (yield from source.peek()) == closing:
            continue  # a trailing comma
        emit(separator)
        separator = ", "
        if opening == "(":
            key = (yield from source.scalar("=,()[]{}\"'\n")).strip()
            if not key or not (yield from source.literal("=")):
                raise MalformedCallError
            emit(f"{json.dumps(key, ensure_ascii=False)}: ")
        elif opening == "{":
            yield from _read_value(source, nesting)
            yield from source.skip_space()
            if not (yield from source.literal(":")):
                raise MalformedCallError
            emit(": ")
        yield from _read_value(source, nesting)


def _read_value(source: Source, nesting: int) -> Steps[None]:
    yield from source.skip_space()
    first = yield from source.peek()
    if first and first in "[{":
        source.advance()
        yield from _read_items(source, first, nesting + 1)
    elif first and first in "\"'":
        source.advance()
        yield from _read_string(source, first)
    else:
        scalar = (yield from source.scalar(",)]}:\n")).strip()
        if not scalar:
            raise MalformedCallError
        source.output.arguments(_WORDS.get(scalar) or as_json(scalar))


def _read_string(source: Source, quote: str) -> Steps[None]:
    emit = source.output.arguments
    emit('"')
    while True:
        found = yield from source.until((quote, "\\"), lambda text: emit(escaped(text)))
        if found is None:
            raise MalformedCallError
        if found == quote:
            emit('"')
            return
        if not (yield from source.peek()):
            raise MalformedCallError
        yield from _read_escape(source)


def _read_escape(source: Source) -> Steps[None]:
    kind, digits = source.advance(), ""
    for _ in range(_HEX_DIGITS.get(kind, 0)):
        if not (yield from source.peek()):
            raise MalformedCallError
        digits += source.advance()
    try:
        text = chr(int(digits, 16)) if digits else _ESCAPES.get(kind, kind)
    except (ValueError, OverflowError):
        text = f"\\{kind}{digits}"
    source.output.arguments(escaped(text))


def _value_rule(schema: Any, shared: Mapping[str, Any], lark: Lark) -> str:
    inner = schema if isinstance(schema, Mapping) else {}
    if inner.get("type") == "boolean":
        return '("True" | "False")'
    return lark.schema({**inner, **shared})


def _written(value: Any) -> str:
    """Write a value in Python's syntax, with JSON's quotes."""
    if isinstance(value, dict):
        pairs = (f"{_written(key)}: {_written(inner)}" for key, inner in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)
