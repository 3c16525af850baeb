"""Lowering keeps what a schema admits: jsonschema judges both schemas, and the compiler's texts."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.server.schema_table import REFUSED as SCHEMA_REFUSED

from appliance.docs import read
from appliance.errors import RequestError
from appliance.grammar.check import answer_of
from appliance.grammar.grammar import Grammar, GrammarKind
from appliance.grammar.keywords import COMPILED, FORMATS, REFUSED, REWRITTEN
from appliance.grammar.lowering import lowered
from appliance.grammar.patterns import exact_classes, other_texts, without_lookahead
from appliance.grammar.source import limits, source_of

JUDGE = jsonschema.Draft202012Validator
SCALARS: list[Any] = [None, False, True, 0, 1, 2, 2.5, -1, "", "a", "ab", "b", "abc"]
SMALL: list[Any] = [None, True, 1, 2, "a"]
ARRAYS = [list(items) for size in range(4) for items in combinations([1, 1, "a", True, None], size)]
OBJECTS = [
    dict(zip(names, values, strict=True))
    for size in range(4)
    for names in combinations(["a", "b", "c"], size)
    for values in combinations([1, "a", None, True, 2], size)
]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS]

scalars = st.sampled_from(SMALL)
names = st.sampled_from(["a", "b", "c"])
leaves = st.one_of(
    st.booleans(),
    st.builds(lambda kind: {"type": kind}, st.sampled_from(["string", "number", "null", "array"])),
    st.builds(lambda kinds: {"type": kinds}, st.sampled_from([["integer", "string"], ["object"]])),
    st.builds(lambda value: {"const": value}, scalars),
    st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=3)),
    st.builds(
        lambda key, bound: {key: bound},
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.integers(-1, 2),
    ),
    st.builds(
        lambda key, bound: {key: bound},
        st.sampled_from(["minLength", "maxLength", "minItems", "maxItems", "minProperties"]),
        st.integers(0, 2),
    ),
    st.builds(lambda wanted: {"required": wanted}, st.lists(names, max_size=2)),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with the keywords that lowering rewrites."""
    several = st.lists(inner, min_size=1, max_size=2)
    by_name = st.dictionaries(names, inner, max_size=2)
    lists = st.dictionaries(names, st.lists(names, max_size=2), max_size=2)
    listed = st.builds(lambda values: {"enum": values}, st.lists(scalars, min_size=1, max_size=3))
    return st.fixed_dictionaries(
        {},
        optional={
            "not": inner,
            "if": inner,
            "then": inner,
            "else": inner,
            "allOf": several,
            "anyOf": several,
            "properties": by_name,
            "type": st.sampled_from(["object", "array", "string", ["object", "array", "null"]]),
            "dependentRequired": lists,
            "dependentSchemas": by_name,
            "propertyNames": st.one_of(
                st.sampled_from([{"type": "string"}, {"enum": ["a", "c"]}, {"pattern": "[ab]"}]),
                st.sampled_from([{"maxLength": 1}, {"const": "b"}, True, False, {"minLength": 2}]),
            ),
            "uniqueItems": st.booleans(),
            "items": st.one_of(inner, listed),
            "maxItems": st.integers(0, 3),
            "contains": inner,
            "minContains": st.sampled_from([0, 1]),
            "unevaluatedProperties": st.one_of(st.booleans(), inner),
            "unevaluatedItems": st.one_of(st.booleans(), inner),
            "format": st.sampled_from(["path", "password", "int64"]),
            "$schema": st.just("https://example.org/mine"),
        },
    )


@settings(max_examples=200, deadline=None, derandomize=True)
@given(schema=st.recursive(leaves, larger, max_leaves=5).filter(lambda one: isinstance(one, dict)))
def test_a_lowered_schema_admits_what_the_schema_does(schema: dict[str, Any]) -> None:
    try:
        simpler = lowered(schema)
    except RequestError:
        assume(False)
    assert keywords_of(simpler) <= {*COMPILED}
    assert lowered(simpler) == simpler, "once is enough: the engine gets it lowered"
    before, after = JUDGE(schema), JUDGE(simpler)
    for value in VALUES:
        assert before.is_valid(value) == after.is_valid(value), (value, simpler)


def keywords_of(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, value in schema.items():
        inner: list[Any] = []
        if key in ("properties", "patternProperties"):
            inner = list(value.values())
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            inner = value
        elif key in ("items", "additionalProperties"):
            inner = [value]
        found = found.union(*map(keywords_of, inner))
    return found


def permitted(schema: Any, text: str) -> bool:
    """Whether the compiler's grammar of a lowered schema contains a text."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(lowered(schema)))
    matcher = LLMatcher(LLTokenizer("byte"), source_of(grammar), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


PATTERNS = [
    # zod's z.email(), the usual rules for passwords, and similar ones
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{4,}$",
    r"^(?!abc$|ab)(?!x)[a-c.@]*$",
    r"^(?!$)(?!.*--)[a-]*$",
    r"^[^\"]*$",
    r"^[^\\\\]*$",
    r"^(?=a)",
]  # fmt: skip
TEXTS = [
    "a@b.co", ".a@b.co", "a..b@c.de", "a.b@c.de", "@", "abc", "ab", "abcd", "a", "", "x", "c.a",
    "Ab1d", "abcD", "ABC1", "AAAA", "1234", "a-a", "a--a", "--", "-", "\"", "\\", "a\"b", "a\\b",
    "é", "a\n..",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_permits_what_it_matches(pattern: str) -> None:
    judge = JUDGE({"type": "string", "pattern": pattern})
    found = {
        text for text in TEXTS if permitted(judge.schema, json.dumps(text, ensure_ascii=False))
    }
    assert found == {text for text in TEXTS if judge.is_valid(text)}


@pytest.mark.parametrize(
    "pattern",
    [r"a(?=b)", r"(?<=a)b", r"^(?!a+)b", r"^(?=a)b|c", r"^(?=a)*b", r"^(?!.*ab)x", r"(?!a)b"],
)
def test_look_ahead_elsewhere_is_refused_with_its_place(pattern: str) -> None:
    with pytest.raises(RequestError, match="look-ahead") as refused:
        without_lookahead(pattern, ("properties", "a", "pattern"))
    assert refused.value.param == "properties.a.pattern"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.text('ab\\"é]^-\n', max_size=4), min_size=1, max_size=4, unique=True),
    other=st.text('ab\\"é]^-\n', max_size=5),
)
def test_the_complement_of_texts_has_all_others(texts: list[str], other: str) -> None:
    pattern = other_texts(texts)
    assert pattern is not None
    for text in [*texts, other, *(text[:-1] for text in texts)]:
        quoted = json.dumps(text, ensure_ascii=False)
        assert permitted({"type": "string", "pattern": pattern}, quoted) is (text not in texts)


def test_a_class_is_only_changed_where_the_compiler_needs_it() -> None:
    for pattern in (r"[^a]", r'["]', r"\[^\"]", r"[a^\"]", "[^"):
        assert exact_classes(pattern) == pattern
    assert exact_classes(r'x[^"a]') == r'x[^\x00"a]'


def test_integers_keep_every_digit_or_are_refused() -> None:
    assert permitted({"type": "integer", "maximum": 2**63 - 1}, str(2**63 - 1))
    for bound in (2**53, 2**53 + 2, 2**59, -(2**59)):
        for key in ("const", "minimum", "maximum"):
            schema = {"type": "integer", key: bound}
            for value in (bound - 1, bound, bound + 1):
                if abs(value) < 2**63:
                    assert permitted(schema, str(value)) is JUDGE(schema).is_valid(value), value
    for bound in (2**53 + 1, 9007199254740999, 2**64, -(2**53) - 1, 10**30):
        wrong: dict[str, Any] = {"maximum": bound, "enum": [bound], "const": {"a": [bound]}}
        for key, value in wrong.items():
            with pytest.raises(RequestError, match="digits") as refused:
                lowered({"items": {"anyOf": [{key: value}]}})
            assert refused.value.param == f"items.anyOf.0.{key}"


def test_a_schema_that_stands_for_too_many_is_refused() -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(25):  # each level doubles it
        nested = {"if": nested, "then": {"not": nested}, "else": {"maxLength": 3}}
    answer = answer_of({"kind": "json_schema", "text": json.dumps({"const": 1, "if": {}})})
    assert "text" in answer
    with pytest.raises(RequestError, match="stands for more than"):
        lowered(nested)


def test_null_is_absent_in_a_schema() -> None:
    keys = (
        "properties",
        "required",
        "items",
        "anyOf",
        "pattern",
        "minimum",
        "not",
        "propertyNames",
    )
    schema = {"type": "object", **dict.fromkeys(keys)}
    assert lowered(schema) == {"type": "object"}
    assert lowered({"const": None, "default": None}) == {"const": None, "default": None}


def test_the_documentation_lists_exactly_what_is_refused() -> None:
    section = read("api").text.partition("## Structured output")[2].partition("\n## ")[0]
    table = section.partition("| keyword | refused |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(listed) == len(set(listed))
    refused = {keyword for keyword, _ in SCHEMA_REFUSED} - {"type"}  # this is no schema
    assert {*REWRITTEN, *REFUSED} <= set(listed)
    assert refused <= set(listed)
    known = {*REWRITTEN, *REFUSED, *COMPILED}
    assert set(listed) <= known
    for format in FORMATS:
        assert f"`{format}`" in section
        assert not permitted({"type": "string", "format": format}, '"?"')
    assert permitted({"type": "string", "format": "uri-reference"}, '"?"')
