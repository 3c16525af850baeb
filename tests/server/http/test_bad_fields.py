"""Every field with every wrong kind of value is refused by its name, before the engine sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.server.http.test_bad_input import (
    BAD_BODIES,
    CHAT,
    CHAT_FIELDS,
    COMPLETIONS,
    PROMPTS,
    USER,
    WRONG_CHOICES,
    check_error,
)
from tests.server.requests.test_structured_output import BAD as BAD_FORMS
from tests.server.retrieval.test_bad_texts import ROWS as BAD_TEXTS

if TYPE_CHECKING:
    from tests.server.conftest import Serve

NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "length_penalty", "timeout",
)  # fmt: skip
WHOLE = ("max_tokens", "min_tokens", "n", "best_of", "top_k", "seed", "priority")
FLAGS = ("stream", "ignore_eos", "use_beam_search")
WRONG: dict[tuple[str, ...], tuple[Any, ...]] = {
    NUMBERS: ("1", [], {}, True),
    WHOLE: ("1", [1], {}, False, 1.5, 2**70),
    FLAGS: ("true", 1, [], {}),
    ("stop",): (5, {}, [None], [[]], True),
    ("stop_token_ids",): (5, "5", {}, ["a"], [1.5], [True]),
    ("logit_bias",): (5, [], "x", {"1": "x"}, {"1": None}, {"1": []}, {"": 1}),
    ("stream_options",): (5, [], "x", {"include_usage": 1}),
    ("cache_salt",): (5, [], {}, True),
    ("model",): (5, [], {}, True),
}
ROWS = [
    (path, name, value)
    for path in (CHAT, COMPLETIONS)
    for names, values in WRONG.items()
    for name in names
    for value in values
]


async def test_a_value_of_another_kind_is_refused_by_its_field(serve: Serve) -> None:
    async with serve() as running:
        for path, name, value in ROWS:
            body = {"messages": [USER]} if path == CHAT else {"prompt": "x"}
            response = await running.http.post(path, json={**body, name: value})
            error = check_error(response, 400)
            assert error["param"] == name, (path, name, value, error)
        assert running.state.engine.stats.steps_total == 0
        assert (await running.complete("x", max_tokens=1)).status_code == 200


def test_so_many_bad_inputs_are_in_the_tables() -> None:
    rows = {repr(row) for row in ROWS}
    assert len(rows) == len(ROWS), "none stands there twice"
    tables: tuple[list[Any], ...] = (
        BAD_BODIES, CHAT_FIELDS, PROMPTS,
        WRONG_CHOICES, BAD_FORMS, ROWS, BAD_TEXTS,
    )  # fmt: skip
    assert sum(map(len, tables)) >= 400
