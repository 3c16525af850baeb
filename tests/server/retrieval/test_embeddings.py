"""Embeddings over OpenAI's and Ollama's routes, with an engine that counts letters.

It counts a to g in a prompt, and all of its letters, so that tests can predict the vectors.
"""

from __future__ import annotations

import asyncio
import base64
import math
import os
import signal
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

from appliance.engine.nouns.request import Pooling
from appliance.model_files.retrieval_recipe import EmbeddingRecipe, RetrievalRecipe
from appliance.server.retrieval import readings
from tests.server.ollama.test_ollama import client_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve

PATH = "/v1/embeddings"
FAIL = 268  # a token with which the echo fails


def vector(text: str, dimensions: int = 8) -> list[float]:
    counts = [*(float(text.count(letter)) for letter in "abcdefg"), float(len(text))][:dimensions]
    length = math.hypot(*counts) or 1.0
    return [count / length for count in counts]


async def embed(running: Running, given: Any, **fields: Any) -> Any:
    answer = await running.http.post(PATH, json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_every_form_of_input_gets_its_vector(serve: Serve) -> None:
    async with serve() as running:
        for given, texts in (
            ("abba", ["abba"]),
            (["abba", "cage"], ["abba", "cage"]),
            ([97, 98, 98, 97], ["abba"]),
            ([[97, 98], [99]], ["ab", "c"]),
        ):
            answer = await embed(running, given)
            assert answer["object"] == "list"
            assert answer["model"] == "echo"
            for number, (one, text) in enumerate(zip(answer["data"], texts, strict=True)):
                assert (one["object"], one["index"]) == ("embedding", number)
                assert one["embedding"] == pytest.approx(vector(text), rel=1e-6)
            read = sum(map(len, texts))
            assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == read
        await until(running.idle)


async def test_base64_has_the_same_bits_and_fewer_dimensions_length_one(serve: Serve) -> None:
    async with serve() as running:
        floats = (await embed(running, "deadbeef"))["data"][0]["embedding"]
        packed = (await embed(running, "deadbeef", encoding_format="base64"))["data"][0]
        assert (
            array("f", base64.b64decode(packed["embedding"])).tolist()
            == array("f", floats).tolist()
        )
        short = (await embed(running, "deadbeef", dimensions=3))["data"][0]["embedding"]
        assert short == pytest.approx(vector("deadbeef", 3), rel=1e-6)
        assert math.hypot(*short) == pytest.approx(1.0)
        nothing = (await embed(running, "zzz", dimensions=3))["data"][0]["embedding"]
        assert nothing == [0.0, 0.0, 0.0]


async def test_thousands_of_inputs_pass_a_short_queue(serve: Serve) -> None:
    texts = [f"{'ab'[number % 2]}{number}" for number in range(readings.WINDOW * 10)]
    async with serve(server={"max_queue": readings.WINDOW}, max_num_seqs=8) as running:
        answer = await embed(running, texts)
        for one, text in zip(answer["data"], texts, strict=True):
            assert one["embedding"] == pytest.approx(vector(text), rel=1e-6)
        assert running.state.metrics.finished == 1, "one request, whatever its inputs"


async def test_the_openai_package_reads_either_format(serve: Serve) -> None:
    async with serve() as running:
        create = running.openai.embeddings.create
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await create(model="echo", input=["bad", "fee"], **options)
            first, second = (one.embedding for one in answer.data)
            if options.get("encoding_format") == "base64":
                assert isinstance(first, str)
                continue
            assert first == pytest.approx(vector("bad"), rel=1e-6)
            assert second == pytest.approx(vector("fee"), rel=1e-6)
            assert answer.usage.prompt_tokens == 6


async def test_the_ollama_package_gets_vectors_in_both_forms(serve: Serve) -> None:
    async with serve() as running:
        async with client_of(running) as client:
            answer = await client.embed("echo:latest", ["bad", "fee"], dimensions=4)
            assert [list(one) for one in answer.embeddings] == [
                pytest.approx(vector("bad", 4), rel=1e-6),
                pytest.approx(vector("fee", 4), rel=1e-6),
            ]
            assert answer.prompt_eval_count == 6
            older = await client.embeddings("echo", "bad")
            assert list(older.embedding) == pytest.approx(vector("bad"), rel=1e-6)
            assert list((await client.embed("echo", "")).embeddings) == []
        wrong = await running.http.post("/api/embed", json={"model": "echo", "input": ["x" * 600]})
        assert (wrong.status_code, "context" in wrong.json()["error"]) == (400, True)


@pytest.fixture
def recipe(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the tokenizer's checkpoint give a recipe."""

    def say(embedding: EmbeddingRecipe) -> None:
        monkeypatch.setattr(byte_tokenizer, "retrieval", RetrievalRecipe(embedding))

    return say


async def test_what_the_checkpoint_says_is_done(serve: Serve, recipe: Any) -> None:
    prompts = {"query": "dd ", "document": ""}
    recipe(EmbeddingRecipe(Pooling.LAST, False, "modules.json", prompts, default_prompt=None))
    async with serve() as running:
        raw = (await embed(running, "cab"))["data"][0]["embedding"]
        assert raw == [1, 1, 1, 0, 0, 0, 0, 3], "nothing is normalized"
        asked = (await embed(running, "cab", prompt_name="query"))["data"][0]["embedding"]
        assert asked == [1, 1, 1, 2, 0, 0, 0, 6]
        ids = (await embed(running, [99], prompt_name="query"))["data"][0]["embedding"]
        assert ids == [0, 0, 1, 0, 0, 0, 0, 1]
        wrong = await running.http.post(PATH, json={"input": "a", "prompt_name": "title"})
        assert "those it has: document, query" in wrong.json()["error"]["message"]
        assert wrong.json()["error"]["param"] == "prompt_name"


async def test_a_model_that_cannot_says_why(serve: Serve, recipe: Any) -> None:
    recipe(EmbeddingRecipe(refused="modules.json has a module of type 'Dense'"))
    async with serve() as running:
        answer = await running.http.post(PATH, json={"input": "a"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "embeddings_unsupported")
        assert "'Dense'" in error["message"]
        below = await running.http.post("/api/embed", json={"model": "echo", "input": "a"})
        assert "'Dense'" in below.json()["error"]


async def test_a_client_that_goes_away_leaves_nothing(serve: Serve) -> None:
    async with serve("holds_at=2") as running:
        asked = asyncio.create_task(running.http.post(PATH, json={"input": ["aaaa"] * 40}))
        await until(lambda: running.engine.num_running > 0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: running.idle() and running.state.metrics.finished == 1)


async def test_an_engine_that_fails_on_one_ends_them_all(serve: Serve) -> None:
    async with serve() as running:
        answer = await running.http.post(PATH, json={"input": [[97], [FAIL], [98]]})
        assert answer.status_code == 500
        await until(running.idle)


async def test_a_timeout_is_the_requests_own_fault(serve: Serve) -> None:
    async with serve("holds_at=2") as running:
        for seconds in (0.05, 1e-9):  # the second one expires before it begins
            body = {"input": "aaaa", "timeout": seconds}
            answer = await running.http.post(PATH, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "timeout")
            assert error["code"] == "timeout"


async def test_texts_that_a_dead_engine_had_are_read_again(serve: Serve, tmp_path: Path) -> None:
    goes_on = tmp_path / "goes_on"
    texts = [f"{letter}abc" for letter in "abcdefg"]
    async with serve(f"holds_at=2 until={goes_on}") as running:
        engine = running.engine
        waiting = asyncio.create_task(running.http.post(PATH, json={"input": texts}))
        await until(lambda: engine.num_running > 0)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.restarts == 1)
        goes_on.touch()
        answer = await waiting
        assert answer.status_code == 200, answer.text
        for one, text in zip(answer.json()["data"], texts, strict=True):
            assert one["embedding"] == pytest.approx(vector(text), rel=1e-6)
        await until(running.idle)
