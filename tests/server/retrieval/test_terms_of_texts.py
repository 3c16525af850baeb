"""Keys, limits, queue, ids, log, metrics and repeats work as on every other endpoint."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

from appliance.server.http import access_log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import Serve

READ: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["you"]},
    "/v1/score": {"text_1": "hello", "text_2": "you"},
    "/api/embed": {"model": "echo", "input": "hello"},
    "/api/embeddings": {"model": "echo", "prompt": "hello"},
}
TOLD: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104]},
}
KEY = "a-key-of-ann"


@pytest.fixture(autouse=True)
def _level_as_before() -> Iterator[None]:
    yield
    logging.getLogger(access_log.__name__).setLevel(logging.NOTSET)


async def test_the_key_is_wanted_and_bodies_are_bounded(serve: Serve) -> None:
    async with serve(server={"api_key": KEY, "max_body_bytes": 2048}) as running:
        for path, body in (READ | TOLD).items():
            assert (await running.http.post(path, json=body)).status_code == 401
            headers = {"x-api-key": KEY}
            assert (await running.http.post(path, json=body, headers=headers)).status_code == 200
            large = {**body, "user": "x" * 3000}
            assert (await running.http.post(path, json=large, headers=headers)).status_code == 413


async def test_a_key_has_so_many_open_and_a_queue_so_much_room(serve: Serve) -> None:
    for path in ("/v1/embeddings", "/v1/rerank"):
        body = READ[path]
        for server in ({"api_keys": {"ann": f"{KEY} parallel=1"}}, {"max_queue": 0}):
            async with serve(
                "holds_at=2", server=server, headers={"x-api-key": KEY}, max_num_seqs=1
            ) as running:
                first = asyncio.create_task(running.http.post(path, json=body))
                await until(lambda: running.state.engine.num_running > 0)
                more = await running.http.post(path, json=body)
                assert more.status_code == 429, (path, server)
                assert int(more.headers["retry-after"]) > 0
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                await until(running.idle)


async def test_ids_repeats_the_log_and_metrics(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(server={"access_log": True}) as running:
        for number, (path, body) in enumerate(READ.items()):
            headers = {"x-request-id": f"mine-{number}", "idempotency-key": f"once-{number}"}
            first = await running.http.post(path, json=body, headers=headers)
            steps = running.state.engine.stats.steps_total
            again = await running.http.post(path, json=body, headers=headers)
            assert again.content == first.content
            assert again.headers["idempotent-replayed"] == "true"
            assert running.state.engine.stats.steps_total == steps
            assert first.headers["x-request-id"] == f"mine-{number}"
        await until(lambda: all(f"POST {path} 200" in caplog.text for path in READ))
        assert "hello" not in caplog.text
        page = (await running.http.get("/metrics")).text
        assert 'vllm:request_success_total{finished_reason="length"' in page
        read = running.state.metrics.finished
        assert read == len(READ)


async def test_the_usual_log_tells_the_id_of_what_ended_badly(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "appliance")
    scored = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1}
    posted = [*READ.items(), ("/v1/completions", scored)]
    async with serve("holds_at=1", server={"access_log": True}) as running:
        for number, (path, body) in enumerate(posted):
            headers = {"x-request-id": f"gone-{number}"}
            first = asyncio.create_task(running.http.post(path, json=body, headers=headers))
            await until(lambda: running.state.engine.num_running > 0)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await until(running.idle)
            assert f"ended early (x-request-id gone-{number})" in caplog.text
            asked = next(line for line in caplog.messages if f" POST {path} " in line)
            assert asked.endswith(f"gone-{number}"), "also where nothing was answered"
        await running.state.engine.close(now=True)
        for number, (path, body) in enumerate(posted):
            headers = {"x-request-id": f"failed-{number}"}
            answer = await running.http.post(path, json=body, headers=headers)
            assert answer.status_code == 503
            assert f"x-request-id failed-{number}: POST {path} failed with 503" in caplog.text


async def test_priority_is_given_on_the_terms_of_the_key(serve: Serve) -> None:
    keys = {"ann": KEY, "ben": "another-key-of-ben"}
    async with serve(server={"api_keys": keys}, headers={"x-api-key": KEY}) as running:
        for path in ("/v1/embeddings", "/v1/rerank", "/v1/score"):
            pushed = await running.http.post(path, json={**READ[path], "priority": -5})
            assert pushed.status_code == 400
            assert pushed.json()["error"]["param"] == "priority"
            stood = await running.http.post(path, json={**READ[path], "priority": 5})
            assert stood.status_code == 200
