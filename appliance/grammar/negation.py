"""The schema of all values that another schema does not admit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.grammar.keywords import ASSERTIONS, FORMATS, TYPES
from appliance.grammar.patterns import other_texts

if TYPE_CHECKING:
    from appliance.grammar.lowering import Lowering, Place

MAX_DEPTH = 32  # of schemas and references in each other
# By keyword: the type that it is about, the keyword for the other side, and the step to there.
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}


def negated(lowering: Lowering, schema: Any, place: Place) -> Any:
    """Return the lowered complement of a schema.

    Args:
        place: of the schema, for errors.

    Raises:
        RequestError: the compiler's keywords cannot express it.
    """
    return _Negation(lowering, place).of(schema, MAX_DEPTH)


class _Negation:
    def __init__(self, lowering: Lowering, place: Place) -> None:
        self._lowering = lowering
        self._place = place

    def of(self, schema: Any, left: int) -> Any:
        """Return the complement of a schema; `left` is how much deeper it may be."""
        self._lowering.count(self._place, 4)
        if isinstance(schema, Mapping) and "$ref" in schema:
            schema = self._lowering.resolved(schema)
            if schema is None:
                raise self._refusal("such a $ref")
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, Mapping):
            raise self._refusal("what is no schema")
        if left == 0:
            raise self._refusal("schemas nested so deeply")
        given = {key: value for key, value in schema.items() if value is not None or key == "const"}
        return any_of([self._without(key, given, left - 1) for key in given if key in ASSERTIONS])

    def _without(self, key: str, schema: Mapping[str, Any], left: int) -> Any:
        """Return the schema of values that break one keyword."""
        value = schema[key]
        match key:
            case "type":
                return self._other_types(value)
            case "const":
                return self._other_values([value])
            case "enum" if isinstance(value, list):
                return self._other_values(value)
            case "not":
                return self._lowering.lower(value, self._place)
            case "anyOf" if isinstance(value, list):
                return all_of([self.of(one, left) for one in value])
            case "allOf" if isinstance(value, list):
                return any_of([self.of(one, left) for one in value])
            case "if":
                return self._other_branches(schema, left)
            case "required" if isinstance(value, list):
                self._lowering.count(self._place, 2 * len(value))
                absent = [{"type": "object", "properties": {str(name): False}} for name in value]
                return any_of(absent)
            case "properties" if isinstance(value, Mapping):
                others = {name: self.of(one, left) for name, one in value.items()}
                return any_of([
                    {"type": "object", "required": [name], "properties": {name: other}}
                    for name, other in others.items()
                    if other is not False
                ])  # fmt: skip
            case "format" if isinstance(value, str) and value not in FORMATS:
                return False
            case "additionalProperties" | "items" if value is True or value == {}:
                return False
            case "uniqueItems" if value is False:
                return False
            case "then" | "else":  # belong to `if`
                return False
        if key in _OPPOSITES and isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._other_side(key, value)
        raise self._refusal(key)

    def _other_branches(self, schema: Mapping[str, Any], left: int) -> Any:
        """Return (if and not then) or (not if and not else)."""
        condition = schema["if"]
        self._lowering.count(self._place, 4)
        branches = [self._lowering.lower(condition, self._place), self.of(condition, left)]
        return any_of([
            all_of([branch, self.of(schema[key], left)])
            for key, branch in zip(("then", "else"), branches, strict=True)
            if key in schema
        ])  # fmt: skip

    def _other_side(self, key: str, value: float) -> Any:
        self._lowering.check_numbers(value, self._place)
        kind, opposite, step = _OPPOSITES[key]
        if not step:
            return {"type": kind, opposite: value}
        if value != int(value):
            raise self._refusal(key)
        bound = int(value) + step
        return {"type": kind, opposite: bound} if bound >= 0 else False

    def _other_types(self, value: Any) -> Any:
        named = value if isinstance(value, list) else [value]
        if not all(one in (*TYPES, "integer") for one in named):
            raise self._refusal("such a type")
        if "integer" in named and "number" not in named:
            raise self._refusal("the type integer")
        others = [kind for kind in TYPES if kind not in named]
        return {"type": others} if others else False

    def _other_values(self, values: list[Any]) -> Any:
        self._lowering.check_numbers(values, self._place)
        by_type: dict[str, list[Any]] = {kind: [] for kind in TYPES}
        for value in values:
            by_type[_type_of(value)].append(value)
        untouched = [kind for kind in TYPES if not by_type[kind]]
        options: list[Any] = [{"type": untouched}] if untouched else []
        if texts := by_type["string"]:
            pattern = other_texts(texts)
            if pattern is None:
                raise self._refusal("so many or long texts")
            options.append({"type": "string", "pattern": pattern})
        if by_type["boolean"] and by_type["boolean"].count(by_type["boolean"][0]) == len(
            by_type["boolean"]
        ):
            options.append({"const": not by_type["boolean"][0]})
        if numbers := sorted(set(by_type["number"])):
            if any(0 in gap and gap[1] - gap[0] < 1 for gap in pairwise(numbers)):
                raise self._refusal("numbers between which the compiler admits a 0 that is none")
            options.append({"type": "number", "exclusiveMaximum": numbers[0]})
            options += [
                {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
                for low, high in pairwise(numbers)
            ]
            options.append({"type": "number", "exclusiveMinimum": numbers[-1]})
        for kind, least in (("array", "minItems"), ("object", "minProperties")):
            if any(by_type[kind]):
                raise self._refusal(f"an {kind} in const or enum")
            if by_type[kind]:  # an empty one
                options.append({"type": kind, least: 1})
        return any_of(options)

    def _refusal(self, what: str) -> RequestError:
        return RequestError(
            f"not supported: {self._place[-1]} with {what}, since its opposite cannot be expressed",
            param=".".join(self._place),
        )


def any_of(options: list[Any]) -> Any:
    """Return the schema of values that obey one of several."""
    found = [one for one in options if one is not False]
    if any(one is True or one == {} for one in found):
        return True
    return False if not found else found[0] if len(found) == 1 else {"anyOf": found}


def all_of(parts: list[Any]) -> Any:
    """Return the schema of values that obey all of several."""
    found = [one for one in parts if one is not True and one != {}]
    if any(one is False for one in found):
        return False
    return True if not found else found[0] if len(found) == 1 else {"allOf": found}


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
