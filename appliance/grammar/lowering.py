"""Lowers a JSON Schema to the keywords that llguidance compiles, without admitting anything else.

What the specification says to ignore goes, what other keywords express exactly is rewritten, and
the rest is refused by name. One exception admits less: a pattern's class that excludes a quote or
a backslash excludes U+0000 too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import permutations
from math import perm
from typing import Any
from urllib.parse import unquote

from appliance.errors import RequestError
from appliance.grammar.endless import is_endless
from appliance.grammar.keywords import (
    ASSERTIONS,
    BOUNDS,
    COUNTS,
    DRAFTS,
    FORMATS,
    REFUSED,
    REWRITTEN,
    TYPES,
)
from appliance.grammar.negation import all_of, any_of, negated
from appliance.grammar.patterns import exact_classes, without_lookahead

Schema = Mapping[str, Any]
Place = tuple[str, ...]

MAX_NODES = 50_000  # of the result: what llguidance takes
MAX_ORDERS = 500  # of the items of an array in which each may come once
MAX_CHARACTERS = 64 * 1024  # of these
MAX_OPTIONAL = 1000  # properties of an object: their work grows with the square
MAX_CONTAINS = 16  # items of an array of which one has to match
MAX_REFERENCES = 16  # followed one after another

_NULLABLE = ("const", "default", "enum", "example", "examples")  # elsewhere null equals absent
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_LENGTHS = frozenset({"minLength", "maxLength"})
_LISTING = frozenset({"const", "enum", "type"})
# What is evaluated beside these depends on the value.
_DECIDING = frozenset({
    "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", *REFUSED,
})  # fmt: skip
_LARGEST = sys.float_info.max
_EXACT = 2**53  # the compiler has numbers as float64
_MOST = 2**63 - 1  # and of integers 64 bits, to which it rounds down


def lowered(schema: Schema) -> Schema:
    """Return the schema in keywords that the compiler knows.

    Raises:
        RequestError: a keyword cannot be expressed exactly; `param` is its place in the schema.
    """
    found = Lowering(schema).lower(schema, ())
    assert isinstance(found, Mapping)
    if is_endless(found, Lowering(found).resolved):
        raise refusal((), "no value obeys this: each would have to hold another one like itself")
    return found


def refusal(place: Place, why: str) -> RequestError:
    return RequestError(why, param=".".join(place) or None)


class Lowering:
    """Lowers parts of one schema.

    Args:
        root: within which references are followed.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._nodes = 0
        # Each returns what has to hold besides, or None.
        self._rules: tuple[Callable[[Schema, Place], Any], ...] = (
            self._dynamic,
            self._properties,
            self._not,
            self._if,
            self._dependencies,
            self._property_names,
            self._unique_items,
            self._contains,
            self._unevaluated_properties,
            self._unevaluated_items,
        )

    def lower(self, schema: Any, place: Place) -> Any:
        """Lower the schema at a place; what is none stays, for the compiler to refuse."""
        if not isinstance(schema, Mapping):
            return schema
        self.count(place)
        schema = {
            key: value for key, value in schema.items() if value is not None or key in _NULLABLE
        }
        kept: dict[str, Any] = {}
        besides: list[Any] = []
        for key, value in schema.items():
            if key in REWRITTEN or key in REFUSED or _says_nothing(key, value):
                continue
            where = (*place, key)
            if key == "$dynamicAnchor":  # an anchor, where no $dynamicRef looks for it
                key = "$anchor"
            if key in _MAPS and isinstance(value, Mapping):
                kept[key] = {
                    name: self.lower(inner, (*where, name)) for name, inner in value.items()
                }
            elif key in _LISTS and isinstance(value, list):
                kept[key] = [
                    self.lower(inner, (*where, str(index))) for index, inner in enumerate(value)
                ]
            elif key in _SINGLE:
                kept[key] = self.lower(value, where)
            elif key == "pattern" and isinstance(value, str):
                kept[key], *more = map(exact_classes, without_lookahead(value, where))
                besides += [{"pattern": one} for one in more]
            else:
                if key in BOUNDS or key in ("const", "enum"):
                    self.check_numbers(value, where)
                kept[key] = count_of(value) if key in COUNTS else value
        besides += [found for rule in self._rules if (found := rule(schema, place)) is not None]
        if besides:
            own = kept.get("allOf", [])
            kept["allOf"] = [*(own if isinstance(own, list) else [own]), *besides]
        return kept

    def count(self, place: Place, nodes: int = 1) -> None:
        """Raise RequestError once the result is too large."""
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise refusal(place, f"the schema stands for more than {MAX_NODES:,} schemas")

    def check_numbers(self, value: Any, place: Place) -> None:
        """Raise RequestError for an integer of which the compiler would lose a digit."""
        values = [value]
        while values:
            match values.pop():
                case dict() as inner:
                    values += inner.values()
                case list() as inner:
                    values += inner
                case int() as number if abs(number) > _EXACT and number != _MOST:
                    if abs(number) > _MOST or int(float(number)) != number:
                        raise refusal(
                            place,
                            f"integers above {_EXACT:,} in const, enum and bounds are supported"
                            " where a floating-point number of 64 bits has all their digits; use"
                            " another one, or a string with a pattern",
                        )

    def resolved(self, schema: Any) -> Any:
        """Follow references within the document; None where one leads elsewhere."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            if not ASSERTIONS.isdisjoint(schema.keys() - {"$ref"}):
                return None
            where, _, path = str(schema["$ref"]).partition("#")
            if where or (path and not path.startswith("/")):
                return None
            schema = self._root
            for part in path.split("/")[1:]:
                name = unquote(part).replace("~1", "/").replace("~0", "~")
                if isinstance(schema, list) and name.isdecimal() and int(name[:9]) < len(schema):
                    schema = schema[int(name)]
                elif isinstance(schema, Mapping) and name in schema:
                    schema = schema[name]
                else:
                    return None
        return None

    def _dynamic(self, schema: Schema, place: Place) -> None:
        for keyword in REFUSED:
            if keyword in schema:
                raise refusal((*place, keyword), f"not supported: {keyword}; use $ref")

    def _properties(self, schema: Schema, place: Place) -> None:
        listed = _map_in(schema, "properties")
        if len(listed) > MAX_OPTIONAL:
            required = {name for name in _list_in(schema, "required") if isinstance(name, str)}
            if len(listed.keys() - required) > MAX_OPTIONAL:
                raise refusal(
                    (*place, "properties"),
                    f"an object may have {MAX_OPTIONAL:,} optional properties; require some, or"
                    " group them",
                )

    def _not(self, schema: Schema, place: Place) -> Any:
        if "not" not in schema:
            return None
        return negated(self, schema["not"], (*place, "not"))

    def _if(self, schema: Schema, place: Place) -> Any:
        """Return (if and then) or (not if and else)."""
        if "if" not in schema or schema.keys().isdisjoint(("then", "else")):
            return None
        condition, where = schema["if"], (*place, "if")
        holds, fails = self.lower(condition, where), negated(self, condition, where)
        branches = [
            all_of([one, self.lower(schema.get(key, True), (*place, key))])
            for key, one in (("then", holds), ("else", fails))
        ]
        return any_of(branches)

    def _dependencies(self, schema: Schema, place: Place) -> Any:
        """Return, for each name, its absence or what it demands."""
        found = []
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            demands = schema.get(keyword, {})
            if not isinstance(demands, Mapping):
                raise refusal((*place, keyword), f"{keyword} must be an object")
            for name, demand in demands.items():
                where = (*place, keyword, name)
                if demand in ([], {}) or demand is True:
                    continue
                if isinstance(demand, list) and keyword != "dependentSchemas":
                    needed: Any = {"required": demand}
                elif isinstance(demand, (Mapping, bool)) and keyword != "dependentRequired":
                    needed = self.lower(demand, where)
                else:
                    raise refusal(where, f"this is no value of {keyword}")
                self.count(where, 3)
                found.append(any_of([{"properties": {name: False}}, needed]))
        return {"allOf": found} if found else None

    def _property_names(self, schema: Schema, place: Place) -> Any:
        place = (*place, "propertyNames")
        names = self.lower(self.resolved(schema.get("propertyNames", True)), place)
        if isinstance(names, bool):
            return None if names else {"additionalProperties": False}
        if isinstance(names, Mapping):
            asks = {key for key in names.keys() & ASSERTIONS if key != "type"}
            kinds = _listed(names.get("type", "string"))
            if "string" not in kinds:
                return {"additionalProperties": False}
            if not asks:
                return None
            if asks <= {"enum", "const"}:
                texts = _list_in(names, "enum") if "enum" in names else [names["const"]]
                wanted = names.get("const")
                listed = {
                    text: True
                    for text in texts
                    if isinstance(text, str) and ("const" not in names or text == wanted)
                }
                self.count(place, len(listed))
                return {"properties": listed, "additionalProperties": False}
            pattern = names.get("pattern")
            if asks <= _LENGTHS:
                least, most = names.get("minLength", 0), names.get("maxLength", "")
                pattern = f"^(?s:.{{{least},{most}}})$"
            if isinstance(pattern, str) and (asks <= _LENGTHS or asks == {"pattern"}):
                return {"patternProperties": {pattern: True}, "additionalProperties": False}
        raise refusal(
            place,
            "propertyNames is supported with an enum, with lengths, and with a pattern of the names"
            " that does not look ahead",
        )

    def _unique_items(self, schema: Schema, place: Place) -> Any:
        if schema.get("uniqueItems") in (None, False) or not _may_be("array", schema):
            return None
        place = (*place, "uniqueItems")
        most = count_of(schema.get("maxItems"))
        if isinstance(most, int) and most <= 1:
            return None
        values = self._values(schema.get("items"))
        if values is not None and schema["uniqueItems"] is True and "prefixItems" not in schema:
            most = min(len(values), most) if isinstance(most, int) else len(values)
            number = sum(perm(len(values), length) for length in range(min(most, 8) + 1))
            longest = most * max(map(_size, values), default=0)
            if number <= MAX_ORDERS and number * longest <= MAX_CHARACTERS:
                self.count(place, number * (most + 1))
                orders = [
                    {
                        "type": "array",
                        "prefixItems": [{"const": value} for value in order],
                        "items": False,
                        "minItems": length,
                    }
                    for length in range(most + 1)
                    for order in permutations(values, length)
                ]
                return any_of([*orders, *_other_types("array", schema)])
        raise refusal(
            place,
            "uniqueItems is supported for items of an enum of up to 5 values, or of more where"
            " maxItems is small",
        )

    def _values(self, schema: Any) -> list[Any] | None:
        """Return the only values that a schema admits, if it lists them."""
        schema = self.resolved(schema)
        if not isinstance(schema, Mapping) or not schema.keys() & ASSERTIONS <= _LISTING:
            return None
        if "const" not in schema and "enum" not in schema:
            kinds: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
            return kinds.get(str(schema.get("type")))
        listed = [schema["const"]] if "const" in schema else _listed(schema["enum"])
        found: list[Any] = []
        for value in listed[: MAX_ORDERS + 1]:
            if not any(same(value, other) for other in found):
                found.append(value)
        return found

    def _contains(self, schema: Schema, place: Place) -> Any:
        if "contains" not in schema or not _may_be("array", schema):
            return None
        wanted, place = schema["contains"], (*place, "contains")
        least, most = count_of(schema.get("minContains", 1)), count_of(schema.get("maxContains"))
        if least == 0 and most is None:
            return None
        if wanted is True or wanted == {}:
            return {"minItems": least} | ({} if most is None else {"maxItems": most})
        longest = count_of(schema.get("maxItems"))
        if least != 1 or most is not None or not isinstance(longest, int) or longest > MAX_CONTAINS:
            raise refusal(
                place,
                f"contains is supported in arrays of at most {MAX_CONTAINS} items (maxItems), and"
                " without minContains or maxContains",
            )
        item = self.lower(wanted, place)
        self.count(place, longest * longest)
        places = [
            {"type": "array", "prefixItems": [*([True] * index), item], "minItems": index + 1}
            for index in range(longest)
        ]
        return any_of([*places, *_other_types("array", schema)])

    def _unevaluated_properties(self, schema: Schema, place: Place) -> Any:
        return self._unevaluated(
            schema, (*place, "unevaluatedProperties"), "properties", "additionalProperties"
        )

    def _unevaluated_items(self, schema: Schema, place: Place) -> Any:
        return self._unevaluated(schema, (*place, "unevaluatedItems"), "prefixItems", "items")

    def _unevaluated(self, schema: Schema, place: Place, listed: str, others: str) -> Any:
        """Close a schema over what it lists by itself, by references and in `allOf`."""
        keyword = place[-1]
        if schema.get(keyword, True) in (True, {}):
            return None
        known = self._evaluated(schema, others, MAX_REFERENCES)
        if known is None:
            raise refusal(
                place,
                f"{keyword} is supported beside {listed}, allOf and $ref, not where anyOf, oneOf,"
                " if, contains or dependentSchemas decide what is evaluated",
            )
        if any(others in one for one in known) or any(keyword in one for one in known[1:]):
            return None  # that evaluates all
        rest = self.lower(schema[keyword], place)
        if listed == "prefixItems":
            longest = max((len(_list_in(one, listed)) for one in known), default=0)
            return {"prefixItems": [True] * longest, "items": rest}
        names = {name: True for one in known for name in _map_in(one, listed)}
        patterns = {name: True for one in known for name in _map_in(one, "patternProperties")}
        self.count(place, len(names) + len(patterns))
        closed: dict[str, Any] = {"properties": names, "additionalProperties": rest}
        return closed | ({"patternProperties": patterns} if patterns else {})

    def _evaluated(self, schema: Any, others: str, left: int) -> list[Schema] | None:
        """Return the schemas that each value obeys; None if they depend on the value."""
        if not isinstance(schema, Mapping):
            return []
        if not _DECIDING.isdisjoint(schema) or left == 0:
            return None
        if others == "items" and "contains" in schema:
            return None
        found = [schema]
        inner = _list_in(schema, "allOf")
        if "$ref" in schema:
            referred = self.resolved({"$ref": schema["$ref"]})
            if referred is None:
                return None
            inner = [*inner, referred]
        for one in inner:
            more = self._evaluated(one, others, left - 1)
            if more is None or len(found) > MAX_REFERENCES**2:
                return None
            found += more
        return found


def count_of(value: Any) -> Any:
    """Return a whole number that is written as 2.0 as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def same(value: Any, other: Any) -> bool:
    """Return True for equal values of JSON, where true is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    return bool(value == other)


def _says_nothing(key: str, value: Any) -> bool:
    if key in BOUNDS and isinstance(value, float) and abs(value) == _LARGEST:
        return key != "multipleOf"  # of float64, which zod writes down
    if key == "$schema":
        return not isinstance(value, str) or value.removesuffix("#") not in DRAFTS
    return key == "format" and isinstance(value, str) and value not in FORMATS


def _may_be(kind: str, schema: Schema) -> bool:
    named = _listed(schema.get("type", list(TYPES)))
    return kind in named or (kind == "number" and "integer" in named)


def _other_types(kind: str, schema: Schema) -> list[Any]:
    """Return the schema of the other types that a schema may be of, if there are any."""
    others = [one for one in TYPES if one != kind and _may_be(one, schema)]
    return [{"type": others}] if others else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _list_in(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _map_in(schema: Schema, key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}


def _size(value: Any) -> int:
    """Return about how many characters a value has as JSON, at most by far."""
    return len(value) + 8 if isinstance(value, str) else len(str(value)) + 8
