"""JSON schemas by the feature that they test, of the kinds that JSONSchemaBench counts."""

from __future__ import annotations

from typing import Any

SHORT = {"type": "string", "maxLength": 4}


def _object(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


_POINT = _object(x={"type": "integer"}, y={"type": "integer"})

SCHEMAS: dict[str, list[Any]] = {
    "types": [
        {"type": "null"},
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        _object(a={"type": ["boolean", "null"]}, b=SHORT),
    ],
    "enum and const": [
        {"const": 5},
        {"const": {"a": [1, None]}},
        {"enum": ["red", "green"]},
        {"enum": [1, 2.5, "x", None, True]},
        {"enum": [[1, 2], {"a": 1}]},
        _object(kind={"const": "a"}, level={"enum": ["low", "high"]}),
        {"type": "string", "enum": ["", "\n", '"', "\\"]},
    ],
    "integer bounds": [
        {"type": "integer", "minimum": 0, "maximum": 100},
        {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
        {"type": "integer", "minimum": -1000, "maximum": -999},
        {"type": "integer", "minimum": 12, "maximum": 12},
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    ],
    "number bounds": [
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "number", "minimum": -2.5, "maximum": 2.5},
        {"type": "number"},
    ],
    "string length": [
        {"type": "string", "maxLength": 5},
        {"type": "string", "minLength": 3, "maxLength": 3},
        {"type": "string", "minLength": 2, "maxLength": 8},
        {"type": "string", "maxLength": 0},
    ],
    "pattern": [
        {"type": "string", "pattern": "^[a-z]{2,4}$"},
        {"type": "string", "pattern": "^\\d{3}-\\d{2}$"},
        {"type": "string", "pattern": "^(yes|no)$"},
        {"type": "string", "pattern": "^[A-Fa-f0-9]{6}$"},
        {"type": "string", "pattern": "^v\\d{1,2}(\\.\\d{1,2}){0,2}$"},
    ],
    "format": [
        {"type": "string", "format": "date"},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "time"},
        {"type": "string", "format": "duration"},
        {"type": "string", "format": "ipv4"},
        {"type": "string", "format": "ipv6"},
        {"type": "string", "format": "uuid"},
        {"type": "string", "format": "email", "maxLength": 30},
    ],
    "arrays": [
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        {"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},
        {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2},
         "maxItems": 2},
        {"type": "array", "items": _POINT, "maxItems": 2},
        {"type": "array", "maxItems": 0},
    ],
    "tuples": [
        {"type": "array", "prefixItems": [{"type": "boolean"}, SHORT], "items": False,
         "minItems": 2},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 3},
        {"type": "array", "prefixItems": [{"const": "a"}, {"const": "b"}], "maxItems": 2},
    ],
    "properties": [
        _object(a=SHORT),
        _object(a=SHORT, b={"type": "boolean"}, c={"type": "null"}),
        _object([], a=SHORT, b=SHORT),
        _object(["b"], a={"const": 1}, b={"const": 2}, c={"const": 3}),
        _object(),
        _object(**{"with space": SHORT, "": {"const": 1}, 'quo"te': {"const": 2}}),
        _object(**{f"p{n}": {"enum": [n, None]} for n in range(12)}),
    ],
    "additional properties": [
        {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
         "additionalProperties": {"const": 2}, "maxProperties": 3},
        {"type": "object", "minProperties": 1, "maxProperties": 2,
         "additionalProperties": {"type": "null"}},
    ],
    "pattern properties": [
        {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "boolean"}},
         "additionalProperties": False, "maxProperties": 2},
        {"type": "object", "patternProperties": {"^a$": {"const": 1}, "^b$": {"const": 2}},
         "additionalProperties": False, "maxProperties": 2},
    ],
    "nesting": [
        _object(a=_object(b=_object(c=_object(d={"const": 1})))),
        _object(rows={"type": "array", "items": _object(cells={"type": "array",
                "items": {"type": "boolean"}, "maxItems": 2}), "maxItems": 2}),
        _object(from_=_POINT, to=_POINT),
    ],
    "anyOf": [
        {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        {"anyOf": [SHORT, {"type": "integer", "minimum": 0, "maximum": 9}]},
        {"anyOf": [_object(a={"const": 1}), _object(b={"const": 2})]},
        _object(v={"anyOf": [{"const": "x"}, {"type": "array", "items": {"const": 1},
                                              "maxItems": 2}]}),
    ],
    "oneOf": [
        {"oneOf": [{"type": "null"}, {"type": "boolean"}]},
        {"oneOf": [_object(kind={"const": "a"}, x={"const": 1}),
                   _object(kind={"const": "b"}, y={"const": 2})]},
        {"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]},
    ],
    "allOf": [
        {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]},
        {"allOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
                   {"type": "object", "properties": {"b": {"const": 2}}, "required": ["b"]}],
         "maxProperties": 2},
        {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]},
    ],
    "references": [
        {"$defs": {"p": _POINT}, "type": "array", "items": {"$ref": "#/$defs/p"}, "maxItems": 2},
        {"definitions": {"s": SHORT}, **_object(a={"$ref": "#/definitions/s"})},
        _object(a={"const": 1}, b={"$ref": "#/properties/a"}),
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [1, 2]}}, "$ref": "#/$defs/a"},
    ],
    "recursion": [
        {"$defs": {"tree": _object(left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]})},
         "$ref": "#/$defs/tree"},
        {"$defs": {"list": {"anyOf": [{"const": 0}, {"type": "array", "items":
         {"$ref": "#/$defs/list"}, "maxItems": 1}]}}, "$ref": "#/$defs/list"},
    ],
    "what is written in other keywords": [
        {"not": {"type": ["string", "object", "array", "number"]}},
        {**SHORT, "not": {"enum": ["", "a", "ab"]}},
        {"type": "integer", "minimum": 0, "maximum": 5, "not": {"const": 3}},
        {
            **_object(["k"], k={"enum": ["a", "b"]}, x=SHORT, y=SHORT),
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["x"]},
            "else": {"required": ["y"]},
        },
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3, "contains": {"const": True}},
        {**_object([], a=SHORT, b=SHORT), "dependentRequired": {"a": ["b"]}},
        {**_object([], a=SHORT, b=SHORT), "dependentSchemas": {"a": {"required": ["b"]}}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": SHORT},
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": SHORT},
        {**_object([], a=SHORT), "unevaluatedProperties": False},
        {"type": "array", "prefixItems": [SHORT], "unevaluatedItems": False},
        {"type": "string", "pattern": "^(?=.*[0-9])(?!.*--)(?!a)[a-z0-9-]{1,4}$"},
        {"type": "string", "pattern": '^[^"]{0,3}$'},
    ],
    "what asks for nothing": [
        {"type": "string", "maxLength": 3, "format": "path"},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": SHORT},
        {"type": "array", "items": SHORT, "maxItems": 2, "uniqueItems": False},
        {"$schema": "https://example.org/ours", "type": "null", "dependentRequired": {}},
        {"type": "null", "deprecated": True, "contentSchema": {}, "if": {"type": "null"}},
    ],
    "annotations": [
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T",
         "description": "D", "type": "boolean", "default": False, "examples": [True]},
        {"$schema": "http://json-schema.org/draft-07/schema#", **_object(a={"const": 1})},
        {"$id": "https://example.org/x", "type": "null", "deprecated": True, "readOnly": True},
        {"type": "boolean", "$comment": "c", "x-order": 3},
    ],
    "booleans": [
        _object(a=True),
        {"type": "array", "items": False},
        {"type": "object", "properties": {"a": False}, "additionalProperties": False},
    ],
    "other characters": [
        {"enum": ["é", "日本", "😀", "\u0001"]},
        _object(naïve={"const": "ß"}),
        {"type": "string", "pattern": "^[äöü]{2}$"},
    ],
}  # fmt: skip

# Wrong answers that the library accepts nevertheless: 1.9 accepts one.
DEPARTURES: list[tuple[Any, str]] = [
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0"),
]

# For each keyword with a refused form, that form.
REFUSED: list[tuple[str, Any]] = [
    ("$dynamicRef", {"$dynamicRef": "#node"}),
    ("$recursiveRef", {"$recursiveRef": "#"}),
    ("$ref", {"$ref": "https://example.org/schema.json"}),
    ("$ref", {"$ref": "#"}),
    ("const", {"const": 9007199254740993}),
    ("contains", {"type": "array", "contains": {"const": 1}}),
    ("contains", {"type": "array", "maxItems": 3, "contains": {"const": 1}, "maxContains": 1}),
    ("enum", {"enum": [1, [2, 18446744073709551615]]}),
    ("if", {"if": {"pattern": "^a"}, "then": {"minLength": 3}}),
    ("minimum", {"type": "integer", "minimum": 9007199254740993}),
    ("multipleOf", {"type": "number", "multipleOf": 0.123456789123}),
    ("not", {"not": {"type": "integer"}}),
    ("not", {"not": {"pattern": "^a"}}),
    ("not", {"not": {"items": {"type": "string"}}}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("pattern", {"type": "string", "pattern": "a(?!b)"}),
    ("pattern", {"type": "string", "pattern": "^(?!a+b)c"}),
    ("pattern", {"type": "string", "pattern": r"(a)\1"}),
    ("patternProperties", {"patternProperties": {"^a": {}, "b$": {}}}),
    ("properties", {"properties": {f"p{number}": {} for number in range(1001)}}),
    ("propertyNames", {"propertyNames": {"pattern": "^a", "minLength": 3}}),
    ("type", {"type": "float"}),
    ("unevaluatedItems", {"unevaluatedItems": False, "anyOf": [{"prefixItems": [{}]}, {}]}),
    ("unevaluatedProperties", {"unevaluatedProperties": False, "anyOf": [{}, {"type": "null"}]}),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
]
