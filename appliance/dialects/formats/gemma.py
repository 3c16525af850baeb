"""`call:f{key:value}` with its own quotes: FunctionGemma and Gemma 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from appliance.dialects.formats.bare_values import as_json, escaped
from appliance.dialects.formats.form import CallForm, read_content
from appliance.dialects.lark import anywhere
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import Schemas
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps

MAX_NESTING = 64
MAX_SCHEMA_NESTING = 8  # in a schema; deeper values may be any plain value
NO_SCHEMA: Mapping[str, Any] = MappingProxyType({})
_OF_STRINGS = ("pattern", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


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


class NotQuiteJson:
    """Builds rules for values that obey a schema: types, names, enums, numbers, patterns, lengths.

    Args:
        quote: on both sides of a string.
        root: schema that references point into.
    """

    def __init__(self, quote: str, lark: Lark, root: Mapping[str, Any]) -> None:
        self._quote = quote
        self._lark = lark
        self._root = root

    def value(self, schema: Any, nesting: int = 0) -> str:
        schema = self._resolved(schema)
        if nesting > MAX_SCHEMA_NESTING or not isinstance(schema, Mapping):
            return self._plain()
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._lark.rule(" | ".join(map(self._written, values)))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list) and schema[key]:
                several = [self.value(one, nesting + 1) for one in schema[key]]
                return self._lark.rule(" | ".join(several))
        kinds = schema.get("type")
        names = kinds if isinstance(kinds, list) and kinds else [kinds]
        return self._lark.rule(" | ".join(self._of(kind, schema, nesting) for kind in names))

    def _of(self, kind: Any, schema: Mapping[str, Any], nesting: int) -> str:
        match kind:
            case "string":
                return self._string(schema)
            case "integer" | "number":
                bounds = {key: schema[key] for key in _BOUNDS if key in schema}
                return self._lark.schema({"type": kind, **bounds})
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "array":
                item = self.value(schema.get("items"), nesting + 1)
                least, most = schema.get("minItems", 0), schema.get("maxItems", "")
                if most == 0:
                    return '"[" "]"'
                others = f"{{{max(0, least - 1)},{most and most - 1}}}"
                items = f'{item} ("," {item}){others}'
                return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'
            case "object":
                return self._object(schema, nesting)
            case _:
                return self._plain()

    def _object(self, schema: Mapping[str, Any], nesting: int) -> str:
        """Return the rule of an object: required members first, then optional ones."""
        pairs = {
            key: f"{self._lark.mark(key + ':')} {self.value(one, nesting + 1)}"
            for key, one in (schema.get("properties") or {}).items()
        }
        inner = self._lark.members(pairs, schema.get("required") or (), ",")
        return f'"{{" {inner} "}}"'

    def _plain(self) -> str:
        numbers = self._lark.schema({"type": "number"})
        return self._lark.rule(f'{self._string()} | {numbers} | "true" | "false" | "null"')

    def _string(self, schema: Mapping[str, Any] = NO_SCHEMA) -> str:
        if not any(key in schema for key in _OF_STRINGS):
            return f"{self._lark.mark(self._quote)} {self._lark.until(self._quote)}"
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        expressions = [rf"(.|\n){{{least},{most}}}"]
        if isinstance(schema.get("pattern"), str):
            expressions.append(anywhere(schema["pattern"]))
        return f"{self._lark.mark(self._quote)} {self._lark.obeying(expressions, self._quote)}"

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return self._lark.marks(self._quote, value, self._quote)
        return self._lark.mark(json.dumps(value))

    def _resolved(self, schema: Any) -> Any:
        """Follow a schema's reference within its root, if it has one."""
        for _ in range(MAX_SCHEMA_NESTING):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                return schema
            self._lark.spend(len(schema["$ref"]))
            found: Any = self._root
            for name in schema["$ref"].removeprefix("#/").split("/"):
                found = found.get(name) if isinstance(found, Mapping) else None
            schema = found
        return None
