"""Clients' mistakes about texts to read get a 400 that names the field, and nothing worse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.server.http.test_bad_input import check_error

if TYPE_CHECKING:
    from tests.server.conftest import Serve

# By path: a correct body, and wrong values of each field.
GOOD: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
COMMON: dict[str, tuple[Any, ...]] = {
    "model": (5, [], {}),
    "priority": ("1", 101, -1000, 1.5),
    "timeout": ("1", 0, -1, 10**6, {}),
    "cache_salt": (5, [], "x" * 1025),
    "truncate_prompt_tokens": (1, 512),
}
RELEVANCE: dict[str, tuple[Any, ...]] = {
    "instruction": (5, [], "find what is blue"),  # this model is not a reranker
    "max_tokens_per_doc": (10,),
    "max_chunks_per_doc": (1,),
}
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/embeddings": COMMON
    | {
        "input": (
            None, 5, {}, [], "", [""], [[]], [97, "a"], ["a", [97]], [-1], [272], [[1], [10**9]],
            [1.5], [True], "x" * 600, ["a", "x" * 600], ["a"] * 2049,
        ),
        "encoding_format": ("hex", 5, "FLOAT", []),
        "dimensions": (0, -1, 9, 2**40, "8", 1.5, True),
        "prompt_name": ("query", 5, ""),
        "messages": ([{"role": "user", "content": "a"}],),
        "embed_dtype": ("float16",),
        "embedding_types": (["int8"],),
    },
    "/v1/rerank": COMMON
    | RELEVANCE
    | {
        "query": (None, 5, [], ["a"], {"text": "a"}, "", "x" * 600),
        "documents": (
            None, "a", 5, [], {}, [5], [None], [{}], [{"text": 5}], [{"image": "x"}], ["a", ""],
            ["x" * 600], ["a"] * 2049,
        ),
        "top_n": (-1, "1", 1.5, True),
        "return_documents": ("yes", 1),
        "rank_fields": (["title"],),
    },
    "/v1/score": COMMON
    | RELEVANCE
    | {
        "text_1": (None, 5, [], [5], {}, ["a", "b"], ""),
        "text_2": (None, 5, [], {}, [""], "x" * 600),
        "queries": (5, []),
        "documents": (5, {}),
    },
    "/tokenize": {
        "prompt": (None, 5, [], ["a"], [97]),
        "messages": ([], "a", [{"content": "a"}], 5),
        "model": (5,),
        "tools": ("f",),
        "add_special_tokens": ("no", 1),
        "add_generation_prompt": (1,),
        "return_token_strs": ("yes",),
        "chat_template_kwargs": ([],),
        "chat_template": ("{{ 1 }}",),
    },
    "/detokenize": {
        "tokens": (None, "a", [-1], [272], [1.5], ["a"], [[97]], {}, [True]),
        "model": (5,),
    },
    "/v1/completions": {
        "suffix": (5, [], "x"),
        "prompt_logprobs": (-1, 21, "1", 1.5, True, []),
    },
    "/v1/chat/completions": {"prompt_logprobs": (-1, 21, "1", 1.5, True, [])},
}  # fmt: skip
# The field that an error names, where it is not the wrong one.
BLAMED = {
    ("/v1/rerank", "query"): "documents",  # because of its length, and what that causes
    ("/v1/score", "text_1"): "text_2",
}
ROWS = [
    (path, name, value)
    for path, fields in WRONG.items()
    for name, values in fields.items()
    for value in values
]


@pytest.mark.parametrize("path", WRONG)
async def test_each_wrong_value_is_refused_by_its_field(serve: Serve, path: str) -> None:
    async with serve() as running:
        for place, name, value in ROWS:
            if place != path:
                continue
            answer = await running.http.post(path, json={**GOOD[path], name: value})
            error = check_error(answer, 400)
            may = {name, BLAMED.get((path, name), name)}
            assert error["param"] in may, (path, name, value, error)
        assert running.state.engine.stats.steps_total == 0, "none of it reached the engine"
        for name in GOOD[path]:
            less = {key: value for key, value in GOOD[path].items() if key != name}
            if name != "max_tokens":
                error = check_error(await running.http.post(path, json=less), 400)
                assert error["param"] in (name, "prompt"), (path, name)
        unknown = await running.http.post(path, json={**GOOD[path], "model": "gpt-4o"})
        assert check_error(unknown, 404)["code"] == "model_not_found"
        assert (await running.http.post(path, json=GOOD[path])).status_code == 200


async def test_pairs_and_forms_that_do_not_go_together(serve: Serve) -> None:
    async with serve() as running:
        for path, body, param in (
            (
                "/v1/score",
                {"text_1": "a", "queries": "b", "text_2": "c", "documents": "d"},
                "text_1",
            ),
            ("/v1/score", {"queries": "b", "text_2": "c"}, "text_1"),
            ("/v1/score", {"queries": "b"}, "documents"),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ("/v1/score", {}, "text_1"),
            ("/tokenize", {}, "prompt"),
            (
                "/tokenize",
                {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
                "prompt",
            ),
            (
                "/tokenize",
                {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
                "add_special_tokens",
            ),
            ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "stream"),
            (
                "/v1/completions",
                {"prompt": "a", "prompt_logprobs": 1, "max_tokens": 0, "n": 2},
                "n",
            ),
            (
                "/v1/completions",
                {"prompt": "a", "echo": True, "logprobs": 1, "prompt_logprobs": 1},
                "prompt_logprobs",
            ),
            ("/v1/completions", {"prompt": "a", "echo": True, "max_tokens": 0, "n": 2}, "n"),
        ):
            error = check_error(await running.http.post(path, json=body), 400)
            assert error["param"] == param, (path, body, error)


async def test_products_that_would_be_too_large_name_their_numbers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from appliance.server.requests import answer_size

    monkeypatch.setattr(answer_size, "MAX_VECTOR_BYTES", 1024)
    monkeypatch.setattr(answer_size, "MAX_LOGPROBS", 1000)
    async with serve(max_model_len=512) as running:
        post = running.http.post
        nine = {"input": ["a"] * 9}
        error = check_error(await post("/v1/embeddings", json=nine), 400)
        assert error["param"] == "input"
        assert "at most 8 texts" in error["message"]
        packed = await post("/v1/embeddings", json={**nine, "encoding_format": "base64"})
        assert packed.status_code == 200
        short = await post("/v1/embeddings", json={**nine, "dimensions": 7})
        assert short.status_code == 200
        scored = {"prompt": ["a" * 100] * 4, "n": 2, "prompt_logprobs": 1, "max_tokens": 1}
        error = check_error(await post("/v1/completions", json=scored), 400)
        assert error["param"] == "prompt_logprobs"
        assert "4 x 2 x 100 tokens" in error["message"]
