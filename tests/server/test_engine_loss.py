"""The engine dies, hangs or is missing: clients are told, and the server stays up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING

import openai
import pytest
from support.runs.waiting import LIMIT, until

from appliance.engine.process.supervisor import EngineState, SupervisionLimits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Running, Serve

DIE, HANG, FAIL = 264, 267, 268  # see echo_worker.py


async def stream_lines(running: Running, begun: asyncio.Event) -> list[str]:
    """Read one long stream; signal the first data."""
    body = {"prompt": "ab", "max_tokens": 400, "stream": True}
    found = []
    async with running.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(line.removeprefix("data: "))
                begun.set()
    return found


async def test_kill_in_mid_stream(serve: Serve, tmp_path: Path) -> None:
    loading = tmp_path / "loading"
    async with serve(f"holds_at=20 loads_after={loading}", max_num_seqs=8) as running:
        begun = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(stream_lines(running, event)) for event in begun]
        for event in begun:
            await event.wait()
        queued = [asyncio.create_task(running.complete("xyz", max_tokens=4)) for _ in range(4)]
        await until(lambda: running.engine.num_waiting == 4)
        assert (await running.http.get("/health")).status_code == 200

        pid = running.engine.pid
        assert pid is not None
        loading.touch()
        os.kill(pid, signal.SIGKILL)
        for lines in await asyncio.gather(*streams):
            assert "[DONE]" not in lines
            error = json.loads(lines[-1])["error"]
            assert error["code"] == "engine_unavailable"
            assert "SIGKILL" in error["message"]
            assert all("error" not in json.loads(line) for line in lines[:-1])
        health = await running.http.get("/health")
        assert health.status_code == 503
        assert int(health.headers["retry-after"]) > 0
        assert "restarting" in health.json()["error"]["message"]
        refused = await running.complete("x")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_unavailable"

        loading.unlink()
        for answer in await asyncio.gather(*queued):
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == "xyzx"
        health = await running.http.get("/health")
        assert health.json() == {"status": "ok", "restarts": 1}, "one death refuses nothing"
        assert (await running.complete("x", max_tokens=2)).json()["choices"][0]["text"] == "xx"
        metrics = (await running.http.get("/metrics")).text
        assert 'appliance_engine_restarts_total{model_name="echo"} 1.0' in metrics


async def test_what_nobody_has_seen_anything_of_is_begun_once_more(
    serve: Serve, tmp_path: Path
) -> None:
    goes_on = tmp_path / "goes_on"
    async with serve(f"holds_at=20 until={goes_on}") as running:
        engine = running.engine
        waiting = asyncio.create_task(running.complete("ab", max_tokens=30, n=2))
        await until(lambda: engine.num_running == 1)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.restarts == 1)
        goes_on.touch()
        answer = await waiting
        assert answer.status_code == 200
        assert [choice["text"] for choice in answer.json()["choices"]] == ["ab" * 15, "ba" * 15]
        assert answer.json()["usage"]["completion_tokens"] == 60
        await until(running.idle)


async def test_what_was_lost_twice_is_a_503(serve: Serve) -> None:
    async with serve("holds_at=20") as running:
        engine = running.engine
        waiting = asyncio.create_task(running.complete("ab", max_tokens=300))
        for deaths in range(2):
            await until(lambda: engine.restarts == deaths and engine.num_running == 1)  # noqa: B023
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
        answer = await waiting
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


HASTY = SupervisionLimits(hang_timeout=0.4, step_timeout=LIMIT, backoff=0.01)


async def test_a_step_that_hangs_is_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.server.http.stream.KEEP_ALIVE_SECONDS", LIMIT)
    async with serve(limits=HASTY) as running:
        answer = await running.complete([HANG], stream=True)
        assert answer.status_code == 503, "nothing was sent yet, so the status still tells"
        await until(lambda: running.engine.state is EngineState.READY)
        assert (await running.complete("x", max_tokens=2)).status_code == 200


async def test_a_stopped_engine_is_not_ready_and_then_another_is(serve: Serve) -> None:
    async with serve("step_seconds=0.01", limits=HASTY) as running:
        assert (await running.http.get("/ready")).status_code == 200
        pid = running.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: running.state.doubtful)
        ready = await running.http.get("/ready")
        assert ready.status_code == 503
        assert "does not respond" in ready.json()["error"]["message"]
        await until(lambda: running.engine.restarts == 1)
        await until(lambda: running.engine.state is EngineState.READY)
        assert (await running.http.get("/ready")).status_code == 200
        assert (await running.http.get("/health")).json() == {"status": "ok", "restarts": 1}
        assert (await running.complete("x", max_tokens=2)).status_code == 200


async def test_an_engine_that_cannot_come_back_is_waited_for(serve: Serve, tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"
    limits = SupervisionLimits(backoff=500.0, max_backoff=500.0)
    async with serve(f"refuses_while={obstacle}", limits=limits) as running:
        engine = running.engine
        obstacle.touch()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.seconds_to_start > 400)
        for path in ("/health", "/ready"):
            health = await running.http.get(path)
            assert health.status_code == 503
            assert "restarting" in health.json()["error"]["message"]
        health = await running.http.get("/health")
        assert int(health.headers["retry-after"]) > 400
        assert "restart 2 begins in" in health.json()["error"]["message"]
        assert "memory" not in health.text, "it is open to all"
        answer = await running.complete("x")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 400
        assert "not free yet" in answer.json()["error"]["message"]
        assert (await running.http.get("/metrics")).status_code == 200


async def test_a_request_that_ends_engines_is_refused_and_the_others_are_served(
    serve: Serve,
) -> None:
    """OpenAI's client repeats failed requests, and three deaths used to end the server for good."""
    async with serve() as running:
        lost = await running.complete([DIE, 1], max_tokens=2)
        assert lost.status_code == 503
        assert running.engine.restarts >= 1, "it was begun once more"
        await until(lambda: running.engine.state is EngineState.READY)
        for stream in (False, True):
            refused = await running.complete([DIE, 1], max_tokens=2, stream=stream)
            assert refused.status_code == 500
            assert refused.headers["x-should-retry"] == "false"
            error = refused.json()["error"]
            assert error["code"] == "request_ends_engine"
            assert error["type"] == "server_error"
            assert "this request ends the engine" in error["message"]
        several = await running.complete([[1], [DIE, 1]], max_tokens=2)
        assert several.status_code == 500
        client = running.openai.with_options(max_retries=2)
        with pytest.raises(openai.InternalServerError, match="ends the engine"):
            await client.completions.create(model="echo", prompt=[DIE, 1], max_tokens=2)
        health = (await running.http.get("/health")).json()
        assert health == {"status": "ok", "restarts": 2, "quarantined": 1}
        assert (await running.complete("ab", max_tokens=2)).status_code == 200
        await until(running.idle)
        assert running.engine.restarts == 2


async def test_a_request_that_fails_alone(serve: Serve) -> None:
    async with serve("step_seconds=0.01") as running:
        good = asyncio.create_task(running.complete("ab", max_tokens=20))
        for stream in (True, False):
            bad = await running.complete([FAIL], stream=stream)
            assert bad.status_code == 500
            assert bad.json()["error"]["message"] == "no valid token"
        assert (await good).json()["choices"][0]["text"] == "ab" * 10
        assert running.engine.restarts == 0


async def test_a_full_queue(serve: Serve) -> None:
    async with serve("holds_at=20", max_num_seqs=2, server={"max_queue": 3}) as running:
        tasks = [asyncio.create_task(running.complete("ab", max_tokens=400)) for _ in range(5)]
        await until(lambda: running.engine.num_waiting == 3)
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/completions", {"prompt": "a", "stream": True}),
        ):
            refused = await running.http.post(path, json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["code"] == "queue_full"
        assert (await running.http.get("/health")).status_code == 200
        assert (await running.http.get("/ready")).status_code == 503
        tasks[-1].cancel()
        await until(lambda: running.engine.num_waiting == 2)
        assert (await running.http.get("/ready")).status_code == 200
        too_many = await running.complete(["a"] * 5)
        assert too_many.status_code == 429
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(running.idle)


async def test_keep_alive_comments_while_waiting(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("appliance.server.http.stream.KEEP_ALIVE_SECONDS", 0.05)
    goes_on = tmp_path / "goes_on"
    async with serve(f"holds_at=32 until={goes_on}", max_num_batched_tokens=32) as running:
        body = {"prompt": "a" * 100, "max_tokens": 2, "stream": True}
        async with running.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = []
            async for line in response.aiter_lines():
                lines += [line] if line else []
                if len(lines) == 5:
                    assert set(lines) == {": keep-alive"}
                    goes_on.touch()
        assert lines[-1] == "data: [DONE]"
