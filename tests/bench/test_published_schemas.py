"""The counts of the benchmark of published schemas, on a few schemas from here."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from support.engine.grammar_words import EOS, words

from bench.engine.published_schemas import Judge, files

if TYPE_CHECKING:
    from pathlib import Path

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
# The library accepts this one wrongly, see the table's departures.
LET_THROUGH = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}


def example(data: Any, *, valid: bool) -> dict[str, Any]:
    return {"data": data, "valid": valid}


@pytest.mark.parametrize(
    ("schema", "tests", "found"),
    [
        ({"not": {"type": "integer"}}, [example("x", valid=True)], {}),
        (OPEN, [], {"compiled": 1}),
        (
            OPEN,
            [example({"a": 1}, valid=True), example({"a": "x"}, valid=False)],
            {"compiled": 1, "tested": 1, "examples": 2, "passed": 1},
        ),
        (
            OPEN,
            [example({"a": 1, "b": 2}, valid=True)],
            {"compiled": 1, "tested": 1, "examples": 1, "closed": 1},
        ),
        (
            {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "type": "object"},
            [example({"b": None, "a": None}, valid=True)],  # in another order than in the schema
            {"compiled": 1, "tested": 1, "examples": 1, "refused": 1},
        ),
        (
            LET_THROUGH,
            [example(0, valid=False)],
            {"compiled": 1, "tested": 1, "examples": 1, "let_through": 1},
        ),
        (
            {"type": "array", "items": {"type": "null"}, "minItems": 2},
            [example([None], valid=False), example([None, None], valid=True)],
            {"compiled": 1, "tested": 1, "examples": 2, "passed": 1},
        ),
    ],
)
def test_what_is_counted(schema: Any, tests: list[Any], found: dict[str, int]) -> None:
    judge = Judge(words(), EOS)
    counted = judge.judge({"schema": schema, "tests": tests})
    assert counted == Counter({"schemas": 1, **found})
    assert bool(judge.times.mask) == bool(tests and found)


def test_files_have_categories_by_their_names(tmp_path: Path) -> None:
    for name in ("Github_easy---o1.json", "Github_easy---o2.json", "JME_0.json"):
        (tmp_path / name).write_text(json.dumps({}))
    assert [category for category, _ in files(tmp_path, 1)] == ["Github_easy", "Github_easy", "JME"]
    assert [path.name for _, path in files(tmp_path, 2)] == ["Github_easy---o1.json", "JME_0.json"]
