"""Finds schemas that no finite value obeys, since each value has to hold another of its kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# What is unclear after so many rounds of learning about references, or so many schemas looked at
# in one of them, counts as finite.
MAX_ROUNDS = 16
MAX_LOOKED_AT = 20_000

Resolve = Callable[[Any], Any]


def is_endless(schema: Any, resolve: Resolve) -> bool:
    """Return True if no value obeys a schema because it refers to itself without end.

    Args:
        schema: in the compiler's keywords.
        resolve: follows a reference; None where it leads elsewhere.
    """
    finite: dict[str, bool] = {}  # by reference, as far as known
    for _ in range(MAX_ROUNDS):
        found = _Round(finite, resolve)
        if found.is_finite(schema):
            return False
        learned = {
            name: True
            for name, known in finite.items()
            if not known and found.is_finite(resolve({"$ref": name}))
        }
        if found.left < 0:
            return False
        new = found.met.keys() - finite.keys()
        if not learned and not new:
            return True
        finite |= dict.fromkeys(new, False) | learned
    return False


class _Round:
    """Tells which references are finite, if those known so far are and no others."""

    def __init__(self, finite: Mapping[str, bool], resolve: Resolve) -> None:
        self.left = MAX_LOOKED_AT
        self._finite = finite
        self.met: dict[str, None] = {}
        self._resolve = resolve

    def is_finite(self, schema: Any) -> bool:
        self.left -= 1
        if not isinstance(schema, Mapping) or self.left < 0:
            return True  # what is false the compiler says
        if isinstance(name := schema.get("$ref"), str):
            self.met[name] = None
            if not self._finite.get(name, False) and self._resolve({"$ref": name}) is not None:
                return False
        if not all(map(self.is_finite, _list_in(schema, "allOf"))):
            return False
        for key in ("anyOf", "oneOf"):
            options = _list_in(schema, key)
            known = list(map(self.is_finite, options))  # all of them, to meet their references
            if options and not any(known):
                return False
        if schema.get("type") in ("object", ["object"]):
            listed = schema.get("properties")
            names = set(filter(_is_text, _list_in(schema, "required")))
            if isinstance(listed, Mapping):
                return all(self.is_finite(one) for name, one in listed.items() if name in names)
        if schema.get("type") in ("array", ["array"]) and schema.get("minItems", 0) != 0:
            first = [*_list_in(schema, "prefixItems"), schema.get("items", True)][0]
            return isinstance(first, list) or self.is_finite(first)
        return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_in(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
