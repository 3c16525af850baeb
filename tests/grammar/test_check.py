from __future__ import annotations

import json
import re
from typing import Any

import pytest

from appliance.grammar import Grammar
from appliance.grammar.check import answer_of, problem_of


def inside(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "array", "items": schema}}}


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"type": "strin"}, "type", "strin"),
        ({"not": {"type": "integer"}}, "not", "not supported: not with the type integer"),
        ({"not": {"$ref": "#/nowhere"}}, "not", "not supported: not with such a $ref"),
        ({"if": {"pattern": "a"}, "then": {}}, "if", "not supported: if with pattern"),
        ({"if": {"const": 1}, "then": {"type": "x"}}, "then.type", "x"),
        ({"dependentSchemas": {"a": {"minimum": ""}}}, "dependentSchemas.a.minimum", "f64"),
        ({"dependentRequired": {"a": 1}}, "dependentRequired.a", "no value"),
        ({"uniqueItems": True}, "uniqueItems", "uniqueItems"),
        ({"contains": {"const": 1}}, "contains", "contains"),
        ({"pattern": "a(?=a)b", "type": "string"}, "pattern", "look-ahead"),
        ({"type": "string", "format": 5}, "format", "string"),
        ({"type": "integer", "maximum": 2**53 + 1}, "maximum", "digits"),
        ({"$ref": "https://example.org/x"}, "$ref", "does not fetch"),
        ({"$ref": "#/$defs/nowhere"}, "$ref", "nowhere"),
        ({"properties": 5}, "properties", "object"),
        ({"anyOf": [{"type": "null"}, {"type": "x"}]}, "anyOf.1.type", "x"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3, "type": "string"}]}, "oneOf", "anyOf"),
    ],
)
def test_the_place_of_a_fault_is_found(schema: dict[str, Any], place: str, words: str) -> None:
    for whole, before in ((schema, ""), (inside(schema), "properties.a.items")):
        answer = answer_of({"kind": "json_schema", "text": json.dumps(whole)})
        assert ".".join(answer["place"]) == ".".join(filter(None, (before, place)))
        assert words in answer["refused"]
        assert "\n" not in answer["refused"]


def test_a_schema_that_nothing_obeys_is_refused_unless_it_can_be_left_out() -> None:
    problem = problem_of(Grammar.json_schema({"enum": []}))
    assert problem is not None
    assert problem.place == ("enum",)
    assert problem_of(Grammar.json_schema(inside({"enum": []}))) is None


NODE = {"type": "object", "required": ["next"]}
TO_A, TO_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({**NODE, "properties": {"next": {"$ref": "#"}}}, False),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}}, True),
        ({**NODE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, True),
        ({**NODE, "type": ["object", "null"], "properties": {"next": {"$ref": "#"}}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {**NODE, "properties": {"next": {"type": "array", "items": TO_B}}},
                    "b": {**NODE, "properties": {"next": TO_A}},
                },
            },
            True,
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}],
                "$defs": {
                    "a": {**NODE, "properties": {"next": TO_B}},
                    "b": {**NODE, "properties": {"next": {"oneOf": [TO_A, TO_B]}}},
                },
            },
            False,
        ),
        ({"$ref": "#"}, False),
        ({**TO_A, "$defs": {"a": TO_B, "b": TO_A}}, False),
    ],
)
def test_a_schema_without_a_finite_value_is_refused(schema: dict[str, Any], ends: bool) -> None:
    answer = answer_of({"kind": "json_schema", "text": json.dumps(schema)})
    assert ("text" in answer) is ends
    assert ends or re.search("itself", answer["refused"])


def test_a_definition_is_to_blame_rather_than_who_refers_to_it() -> None:
    schema = {
        "$defs": {"good": {"type": "null"}, "bad": {"type": "x"}},
        "properties": {"a": {"$ref": "#/$defs/bad"}, "b": {"$ref": "#/$defs/good"}},
    }
    problem = problem_of(Grammar.json_schema(schema))
    assert problem is not None
    assert problem.place == ("$defs", "bad", "type")


def test_a_fault_in_lark_has_the_line_that_the_user_wrote() -> None:
    problem = problem_of(Grammar.lark('start: a\n\na: "x" nowhere'))
    assert problem is not None
    assert problem.message.startswith("line 3, column ")
    assert "nowhere" in problem.message


@pytest.mark.parametrize("text", ["(a", "(" * 60_000, "a{2,1}", "[b-a]"])
def test_faults_in_expressions(text: str) -> None:
    problem = problem_of(Grammar.regex(text))
    assert problem is not None
    assert problem.place == ()
    assert 0 < len(problem.message) < 500


def test_what_a_process_answers() -> None:
    assert answer_of({"kind": "regex", "text": "a+"}) == {"text": "a+"}
    assert "start" in answer_of({"kind": "lark", "text": 'root ::= "a"'})["text"]
    assert answer_of({"kind": "lark", "text": "root ::= ("})["place"] == []
    refused = answer_of({"kind": "json_schema", "text": '{"type":"x"}'})
    assert refused == {"refused": "Invalid type: x", "place": ("type",)}
