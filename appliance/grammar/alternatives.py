"""Decides if closing the alternatives of a `oneOf` keeps its meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import permutations
from typing import Any, TypeGuard

MAX_REFERENCES = 16  # followed one after another
MAX_ALTERNATIVES = 64  # compared with each other
_CONTAINERS = frozenset({"object", "array"})
_OPEN = ("additionalProperties", "patternProperties")


def can_close(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return True if closing the alternatives of a schema's `oneOf`, if it has any, admits no more.

    Args:
        schema: a part of the root.
        root: within which references are followed.
    """
    alternatives = schema.get("oneOf")
    if not _is_list(alternatives):
        return True
    kinds = _containers(schema)
    found = [
        one for one in (_resolved(one, root) for one in alternatives) if _containers(one) & kinds
    ]
    if len(found) > MAX_ALTERNATIVES:
        return False
    return all(_misses(one, other, kinds) for one, other in permutations(found, 2))


def _misses(closed: Any, other: Any, kinds: Set[str]) -> bool:
    """Return True if no value of some kinds that one admits, once it is closed, matches another."""
    shared = _containers(closed) & _containers(other) & kinds
    if not shared:
        return True
    if "array" in shared:
        return False
    listed, required = _properties(closed), _required(other)
    if _is_closed(closed) and not required <= listed.keys():
        return True  # it lacks what the other demands
    both = listed.keys() & _properties(other).keys() & (required | _required(closed))
    return any(_differ(listed[name], _properties(other)[name]) for name in both)


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


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow a reference to a part of the same document; True if there is no such part."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        where, at, path = str(schema["$ref"]).partition("#")
        if where or not at:
            return True
        schema = root
        for part in path.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name, True) if isinstance(schema, Mapping) else True
    return True


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


def _differ(schema: Any, other: Any) -> bool:
    """Return True if two schemas are of texts of which none is in both."""
    texts, others = _texts(schema), _texts(other)
    return bool(texts and others) and texts.isdisjoint(others)


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
