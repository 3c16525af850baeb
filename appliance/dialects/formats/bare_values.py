"""Arguments without JSON's quotes, typed by the schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from appliance.dialects.lark import anywhere
from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.lark import Lark
    from appliance.dialects.source import Source, Steps


class ArgumentWriter:
    """Writes the arguments as a JSON object while reading them.

    Args:
        source: the answer; a call has begun.
    """

    def __init__(self, source: Source, schema: Mapping[str, Any]) -> None:
        self._source = source
        self._emit = source.output.arguments
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._separator = "{"

    def read(self, key: str, *closings: str) -> Steps[bool]:
        """Read a value up to one of these marks; return False if the text ends first."""
        self._emit(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        if is_text(self._properties.get(key)):
            self._emit('"')
            found = yield from self._source.until(closings, lambda text: self._emit(escaped(text)))
            if found is not None:
                self._emit('"')
            return found is not None
        pieces: list[str] = []
        found = yield from self._source.until(closings, pieces.append)
        if pieces or found is not None:
            self._emit(as_json("".join(pieces)))
        return found is not None

    def close(self) -> None:
        self._emit("{}" if self._separator == "{" else "}")


def is_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    if "enum" in schema and isinstance(schema["enum"], list):
        return all(isinstance(value, str) for value in schema["enum"])
    return schema.get("type") == "string"


def as_json(text: str) -> str:
    """Return valid JSON unchanged and any other text as a JSON string."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(name: str) -> None:
    raise ValueError(name)


def bare(arguments: str) -> dict[str, str]:
    """Return the arguments as bare texts, as written between marks."""
    values = json.loads(arguments)
    if not isinstance(values, dict):
        raise MalformedCallError
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in values.items()
    }


def bare_arguments(
    schema: Mapping[str, Any],
    lark: Lark,
    before: tuple[str, ...],
    between: tuple[str, ...],
    after: tuple[str, ...],
) -> str:
    """Add rules for the arguments of a call, in the schema's order.

    Args:
        before: marks before a key.
        between: marks between key and value.
        after: marks after the value.
    """
    properties = schema.get("properties") or {}
    required = frozenset(name for name in schema.get("required") or () if isinstance(name, str))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    members = []
    for key, one in properties.items():
        head = lark.marks(*before, key, *between)
        if not is_text(one):
            inner = one if isinstance(one, Mapping) else {}
            value = f"{lark.schema({**inner, **shared})} {lark.marks(*after)}"
        elif "enum" in one:
            texts = lark.rule(" | ".join(map(json.dumps, one["enum"])))
            value = f"{texts} {lark.marks(*after)}"
        elif isinstance(one.get("pattern"), str):
            text = lark.obeying([anywhere(one["pattern"])], after[0])
            value = f"{text} {lark.marks(*after[1:])}"
        else:
            value = f"{lark.until(after[0])} {lark.marks(*after[1:])}"
        members.append(f"({head} {value}){'' if key in required else '?'}")
    return " ".join(members)
