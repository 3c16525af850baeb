from __future__ import annotations

import json
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.grammar.closed import close_objects

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED_A: dict[str, Any] = {**A, "additionalProperties": False}


def closing(schema: dict[str, Any]) -> Any:
    return close_objects(schema, len(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED_A}, "$ref": "#/$defs/x"}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        (
            {"properties": {"properties": A}},
            {"properties": {"properties": CLOSED_A}, "additionalProperties": False},
        ),
    ],
)
def test_an_object_that_lists_its_properties_gets_no_others(
    schema: dict[str, Any], closed: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert closing(schema) == closed
    assert json.dumps(schema) == before
    assert closing(closed) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "additionalProperties": True},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {**A, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {**A, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}},
        {"enum": [{"properties": {"a": 1}}]},
        {"properties": 5},
    ],
)
def test_what_speaks_of_other_properties_stays_open(schema: dict[str, Any]) -> None:
    assert closing(schema) == schema


def described(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


CAT = described(["kind"], kind={"const": "cat"}, name={"type": "string"})
DOG = described(["kind"], kind={"enum": ["dog", "hound"]}, name={"type": "string"})
BY_A, BY_B = described(["a"], a={}), described(["b"], b={})


@pytest.mark.parametrize(
    ("alternatives", "closes"),
    [
        ([CAT, DOG], True),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}], True),
        ([BY_A, BY_B], True),
        ([{**BY_A, "additionalProperties": False}, BY_B], True),
        ([{"const": "a"}, {"type": ["array", "null"]}, A], True),
        ([True, {"type": "null"}], True),
        ([BY_A, described(["a", "b"], a={}, b={})], False),  # {a, b} would become valid
        ([described(["a", "b"], a={}), BY_B], False),
        ([{"type": "array", "items": A}, {"type": "array"}], False),
        ([CAT, {"$ref": "https://example.org/dog"}], False),
        ([CAT, {"$ref": "#/$defs/nobody"}], False),
        ([CAT, True], False),
        ([described([], kind={"const": "cat"}), described([], kind={"const": "dog"})], False),
        ([BY_A, {"type": 5, "required": 5, "properties": 5, "enum": 5}], False),
        ([described([f"p{n}"], **{f"p{n}": {}}) for n in range(70)], False),  # too many to compare
    ],
)
def test_alternatives_are_closed_where_that_makes_no_wrong_value_right(
    alternatives: list[Any], closes: bool
) -> None:
    schema = {"oneOf": alternatives, "$defs": {"cat": CAT, "dog": DOG}}
    closed = closing(schema)
    assert (closed != schema) is closes
    if not closes:
        assert closed is schema


def test_what_encloses_alternatives_says_of_what_kind_they_are() -> None:
    bare = [{key: one[key] for key in ("properties", "required")} for one in (BY_A, BY_B)]
    assert closing({"oneOf": bare}) == {"oneOf": bare}, "all arrays match both"
    closed = closing({"type": "object", "oneOf": bare})
    assert all(one["additionalProperties"] is False for one in closed["oneOf"])


VALUES = [st.just({}), st.sampled_from([{"const": "a"}, {"enum": ["a", "b"]}, {"type": "null"}])]
OBJECTS = st.builds(
    lambda properties, required, more: described(sorted(required), **properties) | more,
    st.dictionaries(st.sampled_from("ab"), st.one_of(VALUES), min_size=1),
    st.sets(st.sampled_from("ab")),
    st.sampled_from([{}, {}, {"additionalProperties": False}, {"minProperties": 2}]),
)
ALTERNATIVES = st.one_of(OBJECTS, OBJECTS, st.sampled_from([{"type": "null"}, {"const": "a"}, {}]))
ANSWERS = [
    {name: value for name, value in zip("abc", chosen, strict=True) if value != "none"}
    for chosen in product(["none", "a", "b", None], repeat=3)
]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(ALTERNATIVES, min_size=2, max_size=3))
def test_what_a_closed_schema_admits_the_open_one_admits_too(alternatives: list[Any]) -> None:
    schema = {"oneOf": alternatives}
    opened = jsonschema.Draft202012Validator(schema)
    closed = jsonschema.Draft202012Validator(closing(schema))
    for answer in ANSWERS:
        assert opened.is_valid(answer) or not closed.is_valid(answer), answer
