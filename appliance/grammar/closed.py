"""Closes objects that list their properties, unless the schema mentions others.

JSON Schema allows more properties than an object lists. A small model then adds some until its
tokens run out, and authors do not expect them: OpenAI's strict schemas demand
`additionalProperties: false`, and llama.cpp's grammars assume it. Whatever a closed schema accepts,
the open one accepts too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import permutations
from typing import Any, NamedTuple, TypeGuard

MAX_REFERENCES = 16  # followed one after another
MAX_ALTERNATIVES = 64  # compared with each other
# Names looked at in all comparisons of a schema: 16 for each of its characters, as 60 alternatives
# of 10 properties need, and at most what takes 0.1 s.
MAX_COMPARED = 300_000
COMPARED_PER_CHARACTER = 16
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")
# Their parts describe one object, so a closed part would exclude what another requires.
_COMBINE = (
    "allOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_COMBINE_BESIDE_PROPERTIES = ("anyOf", "oneOf", "$ref")
_CONTAINERS = frozenset({"object", "array"})
_OPEN = ("additionalProperties", "patternProperties")


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


class Alternatives:
    """Compares the alternatives of a schema's `oneOf`s.

    What a reference names and what an alternative lists is found once, and all comparisons together
    have a budget: a few hundred bytes can name large alternatives again and again.

    Args:
        root: the schema, within which references are followed.
        size: its characters as JSON.
    """

    def __init__(self, root: Mapping[str, Any], size: int) -> None:
        self._root = root
        self._named: dict[str, Any] = {}  # by reference
        self._outlines: dict[int, _Outline] = {}  # by the id of a part of the root
        self._left = min(MAX_COMPARED, COMPARED_PER_CHARACTER * size)

    def can_close(self, schema: Mapping[str, Any]) -> bool:
        """Return True if closing the alternatives of a `oneOf`, if there is one, admits no more.

        Also False once the budget is spent: the schema then stays as it is.

        Args:
            schema: a part of the root.
        """
        alternatives = schema.get("oneOf")
        if not _is_list(alternatives):
            return True
        kinds = _containers(schema)
        found = []
        for one in alternatives:
            outline = self._outline(one)
            if outline.kinds & kinds:
                found.append(outline)
            self._left -= 1
            if len(found) > MAX_ALTERNATIVES or self._left < 0:
                return False
        return all(self._misses(one, other, kinds) for one, other in permutations(found, 2))

    def _misses(self, closed: _Outline, other: _Outline, kinds: Set[str]) -> bool:
        """Return True if no value of some kinds that one admits, once closed, matches another."""
        shared = closed.kinds & other.kinds & kinds
        if not shared:
            return True
        self._left -= 1 + len(closed.listed) + len(closed.required) + len(other.required)
        if "array" in shared or self._left < 0:
            return False
        if closed.closed and not other.required <= closed.listed.keys():
            return True  # it lacks what the other demands
        both = closed.listed.keys() & other.listed.keys() & (other.required | closed.required)
        return any(self._differ(closed.listed[name], other.listed[name]) for name in both)

    def _differ(self, schema: Any, other: Any) -> bool:
        """Return True if two schemas are of texts of which none is in both."""
        texts, others = self._outline(schema).texts, self._outline(other).texts
        self._left -= min(len(texts), len(others))
        return bool(texts and others) and self._left >= 0 and texts.isdisjoint(others)

    def _outline(self, schema: Any) -> _Outline:
        schema = self._resolved(schema)
        if id(schema) not in self._outlines:
            self._outlines[id(schema)] = _Outline(
                kinds=_containers(schema),
                listed=_properties(schema),
                required=_required(schema),
                texts=_texts(schema),
                closed=_is_closed(schema),
            )
        return self._outlines[id(schema)]

    def _resolved(self, schema: Any) -> Any:
        """Follow references to parts of the same document; True if there is no such part."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            name = str(schema["$ref"])
            if name not in self._named:
                self._named[name] = _part_of(self._root, name)
            schema = self._named[name]
        return True


class _Outline(NamedTuple):
    """A schema's properties and texts, for comparisons."""

    kinds: Set[str]
    listed: Mapping[str, Any]
    required: Set[str]
    texts: Set[str]
    closed: bool


def lists_all(schema: Mapping[str, Any]) -> bool:
    """Return True if an object lists all properties that it needs, and says nothing of others."""
    listed = schema.get("properties")
    if not isinstance(listed, Mapping) or not _is_list(schema.get("required", ())):
        return False
    least = schema.get("minProperties", 0)
    return (
        schema.keys().isdisjoint(_OPEN)
        and listed.keys() >= _required(schema)
        and isinstance(least, int)
        and least <= len(listed)
    )


def _is_closed(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    says_so = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return says_so or lists_all(schema)


def _part_of(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a document that a reference names; True if there is none."""
    where, at, path = reference.partition("#")
    if where or not at:
        return True
    part: Any = root
    for step in path.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name, True) if isinstance(part, Mapping) else True
    return part


def _containers(schema: Any) -> Set[str]:
    """Return whether values may be objects, and arrays."""
    if not isinstance(schema, Mapping):
        return frozenset() if schema is False else _CONTAINERS
    if _texts(schema):
        return frozenset()
    kinds = schema.get("type")
    named = [kinds] if isinstance(kinds, str) else kinds
    return _CONTAINERS.intersection(filter(_is_text, named)) if _is_list(named) else _CONTAINERS


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _required(schema: Any) -> Set[str]:
    found = schema.get("required") if isinstance(schema, Mapping) else None
    return frozenset(filter(_is_text, found)) if _is_list(found) else frozenset()


def _texts(schema: Any) -> Set[str]:
    """Return the texts that a schema names; none if it admits anything else."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(named) if _is_list(named) and all(map(_is_text, named)) else frozenset()


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple))


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str)
