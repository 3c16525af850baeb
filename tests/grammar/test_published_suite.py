"""The JSON Schema organisation's own tests: what the compiler's grammar permits and forbids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from appliance.grammar.check import answer_of
from appliance.grammar.grammar import Grammar, GrammarKind
from appliance.grammar.keywords import REFUSED, REWRITTEN
from appliance.grammar.source import limits, source_of

GROUPS = json.loads(Path(__file__).with_name("json_schema_suite.json").read_text())["groups"]
BYTES = LLTokenizer("byte")
# Refused features besides the keywords of the documentation.
MAY_REFUSE = {
    *REWRITTEN, *REFUSED, "oneOf", "pattern", "patternProperties", "multipleOf", "$ref",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip
MOST_REFUSED = 24  # of a quarter of the groups
# Rust's \s has U+0085 in place of ECMAScript's U+FEFF.
OTHER_SPACE = ("ecmascript-regex: ECMA 262 \\s matches", "ecmascript-regex: ECMA 262 \\S matches")


def spelled(value: Any) -> Any:
    """A value whose whole numbers have no fraction, since the grammar allows no other spelling."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return list(map(spelled, value))
    return {key: spelled(one) for key, one in value.items()} if isinstance(value, dict) else value


def orders(value: Any) -> Iterator[Any]:
    """A value with its objects' keys in every order."""
    if isinstance(value, list):
        yield from map(list, product(*(list(islice(orders(one), 24)) for one in value)))
    elif isinstance(value, dict):
        for keys in permutations(value):
            inner = (list(islice(orders(value[key]), 24)) for key in keys)
            yield from (dict(zip(keys, found, strict=True)) for found in product(*inner))
    else:
        yield value


def is_permitted(first: LLMatcher, value: Any) -> bool:
    tokens = list(json.dumps(value, ensure_ascii=False).encode())
    matcher = first.deep_copy()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def check(name: str, schema: Any, tests: list[tuple[Any, bool]]) -> bool:
    """Judge one schema; return False if it is refused."""
    answer = answer_of({"kind": "json_schema", "text": json.dumps(schema)})
    if "refused" in answer:
        if "nsatisfiable" in answer["refused"] or "is empty" in answer["refused"]:
            assert not any(valid for _, valid in tests), (name, answer)
        else:
            last = [part for part in ".".join(answer["place"]).split(".") if part in MAY_REFUSE]
            assert last, (name, answer)
        return False
    grammar = Grammar(GrammarKind.JSON_SCHEMA, answer["text"])
    first = LLMatcher(BYTES, source_of(grammar), log_level=0, limits=limits())
    closed = '"additionalProperties":false' in answer["text"].replace(
        json.dumps(schema, separators=(",", ":")), ""
    ) and '"additionalProperties":false' not in json.dumps(schema, separators=(",", ":"))
    for value, valid in tests:
        if name.startswith(OTHER_SPACE) and value == "\ufeff":
            continue
        if not valid:
            for order in islice(orders(value), 50):
                assert not is_permitted(first, order), (name, order, answer["text"])
        elif not closed:
            value = spelled(value)
            assert any(is_permitted(first, order) for order in orders(value)), (name, value)
    return True


@pytest.mark.parametrize("part", range(4))
def test_exactly_the_valid_values_are_permitted(part: int) -> None:
    refused = [name for name, schema, tests in GROUPS[part::4] if not check(name, schema, tests)]
    assert len(refused) <= MOST_REFUSED, refused
