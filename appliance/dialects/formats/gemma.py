"""`call:f{key:value}` with its own quotes: FunctionGemma and Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.bare_values import as_json, escaped
from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.formats.gemma_values import NotQuiteJson
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

MAX_NESTING = 64


class Gemma(CallForm):
    """Almost JSON: bare keys, and strings between two equal marks.

    Args:
        quote: on both sides of a string.
    """

    def __init__(self, name: str, opening: str, closing: str, quote: str) -> None:
        self.name = name
        self.marks = (opening, closing, quote)
        self.opening, self._closing, self._quote = opening, closing, quote

    def recognises(self, text: str, tool: str) -> bool:
        return f"{self.opening}call:{tool}{{" in text

    def write(self, name: str, arguments: str) -> str:
        return f"{self.opening}call:{name}{self._written(json.loads(arguments))}{self._closing}"

    def frame(self, name: str, schema: Mapping[str, Any], lark: Lark) -> str:
        values = NotQuiteJson(self._quote, lark, schema).value(schema)
        return f"{lark.mark(f'call:{name}')} {values} {lark.mark(self._closing)}"

    def read(self, source: Source, schemas: Schemas) -> Steps[None]:
        def read_call(opening: str) -> Steps[None]:
            if not (yield from source.literal("call:")):
                raise MalformedCallError
            name = (yield from source.scalar("{<\n")).strip()
            if not name or (yield from source.peek()) != "{":
                raise MalformedCallError
            source.begin_call(name)
            yield from self._value(source, 0)
            yield from source.closing(self._closing)
            source.output.end_call()

        yield from read_content(source, (self.opening,), read_call)

    def _value(self, source: Source, nesting: int) -> Steps[None]:
        """Read a value and write it as JSON.

        Raises:
            MalformedCallError: it breaks off or nests too deeply.
        """
        emit = source.output.arguments
        yield from source.skip_space()
        if nesting > MAX_NESTING:
            raise MalformedCallError
        if (yield from source.literal(self._quote)):
            emit('"')
            quote = (self._quote,)
            if (yield from source.until(quote, lambda text: emit(escaped(text)))) is None:
                raise MalformedCallError
            emit('"')
        elif (yield from source.literal("{")):
            yield from self._items(source, "{", "}", nesting)
        elif (yield from source.literal("[")):
            yield from self._items(source, "[", "]", nesting)
        else:
            scalar = (yield from source.scalar(",}]")).strip()
            if not scalar:
                raise MalformedCallError
            emit(as_json(scalar))

    def _items(self, source: Source, opening: str, closing: str, nesting: int) -> Steps[None]:
        emit = source.output.arguments
        emit(opening)
        yield from source.skip_space()
        if (yield from source.literal(closing)):
            emit(closing)
            return
        while True:
            if closing == "}":
                yield from source.skip_space()
                key = yield from self._key(source)
                emit(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(source, nesting + 1)
            yield from source.skip_space()
            if (yield from source.literal(closing)):
                emit(closing)
                return
            if not (yield from source.literal(",")):
                raise MalformedCallError
            emit(", ")

    def _key(self, source: Source) -> Steps[str]:
        if (yield from source.literal(self._quote)):
            key = yield from source.collect(self._quote)
            yield from source.skip_space()
        else:
            key = (yield from source.scalar(":,{}[]")).strip()
        if not (yield from source.literal(":")):
            raise MalformedCallError
        return key

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{self._written(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)
