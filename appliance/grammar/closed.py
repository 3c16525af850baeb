"""Closes objects that list their properties, unless the schema mentions others.

JSON Schema allows more properties than an object lists. A small model then adds some until its
tokens run out, and authors do not expect them: OpenAI's strict schemas demand
`additionalProperties: false`, and llama.cpp's grammars assume it. Whatever a closed schema accepts,
the open one accepts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from appliance.grammar.alternatives import Alternatives, lists_all

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")
# Their parts describe one object, so a closed part would exclude what another requires.
_COMBINE = (
    "allOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_COMBINE_BESIDE_PROPERTIES = ("anyOf", "oneOf", "$ref")


def close_objects(schema: Mapping[str, Any], size: int) -> Mapping[str, Any]:
    """Add `additionalProperties: false` to objects that list their properties.

    A schema that describes one object in several places stays unchanged, and so does one whose
    `oneOf` would admit more with closed alternatives, or has too many to compare.

    Args:
        size: characters of the schema as JSON.
    """
    alternatives = Alternatives(schema, size)
    if any(_combines(node) or not alternatives.can_close(node) for node in _nodes(schema)):
        return schema
    return _closed_object(schema)


def _closed(node: Any) -> Any:
    return _closed_object(node) if isinstance(node, Mapping) else node


def _closed_object(node: Mapping[str, Any]) -> Mapping[str, Any]:
    closed = dict(node)
    for key in closed.keys() & _MAPS:
        if isinstance(closed[key], Mapping):
            closed[key] = {name: _closed(inner) for name, inner in closed[key].items()}
    for key in closed.keys() & _LISTS:
        if isinstance(closed[key], list):
            closed[key] = [_closed(inner) for inner in closed[key]]
    for key in closed.keys() & _SINGLE:
        closed[key] = _closed(closed[key])
    if lists_all(node):
        closed["additionalProperties"] = False
    return closed


def _combines(node: Mapping[str, Any]) -> bool:
    beside = _COMBINE_BESIDE_PROPERTIES if "properties" in node else ()
    return not node.keys().isdisjoint((*_COMBINE, *beside))


def _nodes(node: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every subschema."""
    if not isinstance(node, Mapping):
        return
    yield node
    for key in _MAPS:
        if isinstance(inner := node.get(key), Mapping):
            for part in inner.values():
                yield from _nodes(part)
    for key in _LISTS:
        if isinstance(inner := node.get(key), list):
            for part in inner:
                yield from _nodes(part)
    for key in _SINGLE:
        yield from _nodes(node.get(key))
