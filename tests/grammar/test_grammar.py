from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from appliance.errors import RequestError
from appliance.grammar import Grammar, GrammarKind
from appliance.grammar.grammar import MAX_DEPTH, MAX_TEXT, embedded
from appliance.grammar.source import limits, source_of


def fits(grammar: Grammar, text: str) -> bool:
    from llguidance import LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), source_of(grammar), limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_schema_keeps_its_order_and_equal_ones_are_one() -> None:
    grammar = Grammar.json_schema({"properties": {"b": {}, "a": {}}})
    assert grammar.text == '{"properties":{"b":{},"a":{}},"additionalProperties":false}'
    assert grammar == Grammar.json_schema(' {"properties" : {"b":{}, "a":{}}}')
    assert len({grammar, Grammar.json_schema({"properties": {"a": {}, "b": {}}})}) == 2
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grammar), type=Grammar) == grammar


@pytest.mark.parametrize(
    "text", ["{}", '{"a": 1}', '{\n  "a": [\n    1,\n    2\n  ]\n}', '{"a":1}']
)
def test_json_may_be_compact_spaced_or_indented(text: str) -> None:
    assert fits(Grammar.json_object(), text)
    assert fits(Grammar.lark(f"start: {embedded({'type': 'object'})}"), text)


@pytest.mark.parametrize(
    "text", ['{"a":  1}', '{"a":\t1}', "{\n\n}", "[]", " {}", "{} ", '{"a" 1}']
)
def test_json_has_no_other_space(text: str) -> None:
    assert not fits(Grammar.json_object(), text)


def test_what_a_schema_says_about_our_own_options_is_ignored() -> None:
    schema = {"x-guidance": {"lenient": True, "whitespace_flexible": False}, "type": "object"}
    assert fits(Grammar.json_schema(schema), '{"a": 1}')
    assert fits(Grammar.json_schema(True), "[1, true]")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.regex(r"a/\d+"), ["a/1", "a/99"], ["a/", "/1", "xa/1"]),
        (Grammar.regex("ü|\\w{3}"), ["ü", "abc"], ["ab"]),
        (Grammar.choice(["yes", 'n"o\n', "ü 😀"]), ["yes", 'n"o\n', "ü 😀"], ["ye", "no"]),
        (Grammar.lark('start: "a" b*\nb: "b" | "c"'), ["a", "abcb"], ["b"]),
        (Grammar.lark('root ::= "a" b*\nb ::= [bc]'), ["a", "abcb"], ["b"]),
    ],
)
def test_texts_of_each_kind(grammar: Grammar, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert fits(grammar, text), text
    for text in bad:
        assert not fits(grammar, text), text


def test_gbnf_becomes_lark_once() -> None:
    grammar = Grammar.lark('root ::= "a"')
    assert grammar.kind is GrammarKind.LARK
    assert "::=" not in grammar.text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar.json_schema("{"), "no JSON"),
        (lambda: Grammar.json_schema("[1]"), "a schema is an object"),
        (lambda: Grammar.json_schema(nested(MAX_DEPTH + 1)), "nested too deeply"),
        (lambda: Grammar.json_schema('{"a":' * 5000 + "1" + "}" * 5000), "JSON|nested"),
        (lambda: Grammar.choice([]), "0 choices"),
        (lambda: Grammar.regex("a" * (MAX_TEXT + 1)), "262,144"),
        (lambda: Grammar.lark("root ::= ("), "no GBNF"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make()


def test_a_schema_may_be_as_deep_as_it_is_said() -> None:
    assert json.loads(Grammar.json_schema(nested(MAX_DEPTH - 1)).text) == nested(MAX_DEPTH - 1)
