"""Priority, timeout, queue limits and salts, as clients see them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from support.runs.waiting import until

from appliance.server.requests.terms import prefix_salt

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.server.conftest import Running, Serve

KEYS = {"anna": "anna-secret", "ben": "ben-secret"}
PROMPT = "a" * 64


async def complete(running: Running, name: str = "", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[name]}"} if name else {}
    body = {"prompt": PROMPT, **fields}
    return await running.http.post("/v1/completions", json=body, headers=headers)


def cached(response: httpx.Response) -> int:
    usage = response.json()["usage"]
    tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
    return tokens


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("priority", 101, "between -100 and 100"),
        ("priority", -101, "between -100 and 100"),
        ("priority", 1.5, "int"),
        ("priority", True, "int"),
        ("timeout", 0, "at most 86400 seconds"),
        ("timeout", -1, "at most 86400 seconds"),
        ("timeout", 1e9, "at most 86400 seconds"),
        ("cache_salt", "x" * 1025, "1024"),
    ],
)
async def test_terms_out_of_range_are_refused_with_the_range(
    serve: Serve, field: str, value: object, words: str
) -> None:
    async with serve() as running:
        for path, prompt in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 0}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            refused = await running.http.post(path, json={**prompt, field: value})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == field
            assert words in error["message"]


async def test_the_engine_is_told_the_terms(serve: Serve) -> None:
    async with serve("step_seconds=0.02", server={"max_queue_seconds": 7.0}) as running:
        task = asyncio.create_task(
            complete(running, priority=-3, timeout=60, max_tokens=400, cache_salt="s")
        )
        await until(lambda: bool(running.state.engine.open_requests()))
        ((request, _),) = running.state.engine.open_requests()
        assert (request.priority, request.timeout, request.max_queue_seconds) == (-3, 60, 7)
        assert request.cache_salt == prefix_salt("", "s")
        task.cancel()


async def test_several_keys_may_stand_back_but_not_push_in(serve: Serve) -> None:
    async with serve(server={"api_keys": KEYS}) as running:
        assert (await complete(running, "anna", priority=5, max_tokens=1)).status_code == 200
        refused = await complete(running, "anna", priority=-1, max_tokens=1)
        assert refused.status_code == 400
        assert "between 0 and 100 where several keys" in refused.json()["error"]["message"]


async def test_keys_find_only_their_own_prefixes(serve: Serve) -> None:
    async with serve(server={"api_keys": KEYS}) as running:
        found = [
            cached(await complete(running, name, max_tokens=1, **fields))
            for name, fields in (
                ("anna", {}),
                ("anna", {}),
                ("ben", {}),
                ("ben", {"cache_salt": "x"}),
                ("ben", {}),
                ("anna", {"cache_salt": "x"}),
                ("ben", {"cache_salt": "x"}),
            )
        ]
        assert found == [0, 64, 0, 0, 64, 0, 64]


@pytest.mark.parametrize(
    "server",
    [{"api_keys": KEYS, "share_prefixes_between_keys": True}, {"api_key": KEYS["anna"]}],
)
async def test_prefixes_are_shared_where_that_is_wanted(
    serve: Serve, server: dict[str, Any]
) -> None:
    async with serve(server=server) as running:
        assert cached(await complete(running, "anna", max_tokens=1)) == 0
        second = "ben" if "api_keys" in server else "anna"
        assert cached(await complete(running, second, max_tokens=1)) == 64
        assert cached(await complete(running, second, max_tokens=1, cache_salt="x")) == 0


def test_salts_of_different_owners_and_wishes_never_meet() -> None:
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("a", '", "'), ("b", "a")]
    assert len({prefix_salt(owner, asked) for owner, asked in pairs}) == len(pairs)
    assert prefix_salt("", "") == ""


async def test_salts_and_keys_are_not_logged(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    async with serve(server={"api_keys": KEYS}) as running:
        await complete(running, "anna", max_tokens=1, cache_salt="canary")
        await complete(running, "anna", max_tokens=1, cache_salt="canary" * 999)
        await complete(running, "anna", max_tokens=1, cache_salt="canary", priority=999)
    for secret in ("canary", prefix_salt("anna", "canary"), KEYS["anna"]):
        assert secret not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_waits_too_long_is_a_503_and_nothing_was_computed(
    serve: Serve, stream: bool, tmp_path: Path
) -> None:
    server, goes_on = {"max_queue_seconds": 0.1}, tmp_path / "goes_on"
    knobs = f"holds_at=20 until={goes_on}"
    async with serve(knobs, max_num_seqs=1, server=server) as running:
        first = asyncio.create_task(complete(running, max_tokens=60))
        await until(lambda: running.state.engine.num_running == 1)
        refused = await complete(running, max_tokens=5, stream=stream)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "queue_timeout"
        goes_on.touch()
        assert (await first).json()["choices"][0]["finish_reason"] == "length"
        await until(running.idle)
        text = (await running.http.get("/metrics")).text
        assert 'appliance_requests_expired_total{key="none",state="waiting"} 1.0' in text


async def test_a_request_over_its_time_ends_with_what_it_has(serve: Serve) -> None:
    async with serve("holds_at=100") as running:
        answer = await complete(running, max_tokens=400, timeout=1.0)
        assert answer.status_code == 200
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "timeout"
        assert 0 < len(choice["text"]) < 400
        await until(running.idle)
        text = (await running.http.get("/metrics")).text
        assert 'appliance_requests_expired_total{key="none",state="running"} 1.0' in text
        assert 'appliance_queue_wait_seconds_count{key="none"} 1.0' in text


async def test_a_key_that_fills_the_queue_leaves_the_others_their_share(serve: Serve) -> None:
    server = {"max_queue": 4, "api_keys": KEYS}
    async with serve("holds_at=20", max_num_seqs=1, server=server) as running:
        tasks = [asyncio.create_task(complete(running, "anna", max_tokens=400)) for _ in range(5)]
        await until(lambda: running.state.engine.num_waiting == 4)
        refused = await complete(running, "anna", max_tokens=400)
        assert refused.status_code == 429
        assert "4 requests wait already, 4 of this key" in refused.json()["error"]["message"]
        tasks += [asyncio.create_task(complete(running, "ben", max_tokens=400)) for _ in range(2)]
        await until(lambda: running.state.engine.num_waiting == 6)
        assert (await complete(running, "ben", max_tokens=400)).status_code == 429
        headers = {"authorization": f"Bearer {KEYS['ben']}"}
        text = (await running.http.get("/metrics", headers=headers)).text
        for name in KEYS:
            assert f'appliance_requests_shed_total{{key="{name}"}} 1.0' in text
            waiting = {"anna": 4, "ben": 2}[name]
            sample = f'appliance_requests{{key="{name}",model_name="echo",state="waiting"}}'
            assert f"{sample} {waiting}.0" in text
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(running.idle)
