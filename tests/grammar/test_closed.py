from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.grammar.closed import close_objects

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED_A: dict[str, Any] = {**A, "additionalProperties": False}


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
    assert close_objects(schema) == closed
    assert json.dumps(schema) == before
    assert close_objects(closed) == closed


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
    assert close_objects(schema) == schema
