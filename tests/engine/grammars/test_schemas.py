"""Schemas of all kinds: which ones compile, and that random answers obey them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.grammar_words import EOS, FIRST_BYTE, SIZE, text_of, words
from support.server.schema_table import DEPARTURES, REFUSED, SCHEMAS

from appliance.engine.grammars.compiling import GrammarCompiler
from appliance.engine.grammars.library import GrammarState, open_library
from appliance.engine.grammars.matchers import num_words
from appliance.grammar import Grammar
from appliance.grammar.check import answer_of, problem_of

MAX_TOKENS = 400
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(SIZE, (EOS,), words())


def answer(matcher: GrammarState, choose: Callable[[list[int]], int]) -> str | None:
    """A random model's answer; None if it does not end."""
    mask, tokens = np.zeros((1, num_words(SIZE)), dtype=np.int32), []
    for _ in range(MAX_TOKENS):
        open_library().fill([(matcher, 0)], mask)
        assert not matcher.is_error(), matcher.get_error()
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, "a dead end"
        tokens.append(EOS if EOS in allowed else choose(allowed))
        if tokens[-1] == EOS:
            return text_of(tokens)
        assert matcher.consume_token(tokens[-1])
        if matcher.is_stopped():
            return text_of(tokens)
    return None


def obeys(schema: Any, seeds: int) -> int:
    """Count the random answers that end, after checking each of them."""
    first = compiler().compile(Grammar.json_schema(schema))
    finished = 0
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        text = answer(first.deep_copy(), lambda allowed: int(random.choice(allowed)))  # noqa: B023
        if text is not None:
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(
                json.loads(text)
            )
            finished += 1
    return finished


@pytest.mark.parametrize("feature", SCHEMAS)
def test_random_words_obey_every_schema_of_the_table(feature: str) -> None:
    for schema in SCHEMAS[feature]:
        assert problem_of(Grammar.json_schema(schema)) is None, schema
        assert obeys(schema, seeds=4) > 0, schema


@pytest.mark.parametrize(("keyword", "schema"), REFUSED)
def test_what_cannot_be_promised_is_refused_by_name(keyword: str, schema: Any) -> None:
    refused = answer_of({"kind": "json_schema", "text": json.dumps(schema)})
    assert refused.get("refused")
    assert keyword in refused["place"]


@pytest.mark.parametrize(("schema", "text"), DEPARTURES)
def test_what_is_known_to_be_let_through_still_is(schema: Any, text: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), schema)
    matcher = compiler().compile(Grammar.json_schema(schema)).deep_copy()
    tokens = [FIRST_BYTE + byte for byte in text.encode()]
    assert matcher.consume_tokens(tokens), "mended: tell the documentation"
    assert matcher.is_accepting()


def test_the_table_is_as_large_as_it_is_said_to_be() -> None:
    distinct = Counter(json.dumps(one) for schemas in SCHEMAS.values() for one in schemas)
    assert sum(distinct.values()) + len(REFUSED) >= 100
    assert max(distinct.values()) == 1


names = st.sampled_from(["a", "b", "c d", 'q"', "é"])
leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"const": "x"}, {"enum": [1, "a"]}]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-300, 300),
        st.integers(0, 200),
    ),
    st.builds(lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
              st.integers(0, 3), st.integers(0, 4)),
)  # fmt: skip


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least, more: {
            "type": "array", "items": items, "minItems": least, "maxItems": least + more,
        },
        inner, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip
    objects = st.dictionaries(names, inner, max_size=3).flatmap(
        lambda properties: st.sets(st.sampled_from([*properties, "z"])).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required & properties.keys()),
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(
        arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of})
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=st.recursive(leaves, containers, max_leaves=6), seed=st.integers(0, 2**16))
def test_random_words_obey_random_schemas(schema: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    matcher = compiler().compile(Grammar.json_schema(schema)).deep_copy()
    text = answer(matcher, lambda allowed: int(random.choice(allowed)))
    if text is not None:
        jsonschema.validate(json.loads(text), schema)
