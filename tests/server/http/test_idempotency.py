"""A request that is sent twice, with Idempotency-Key or X-Request-ID, gets one answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.runs.waiting import until

from appliance.server.http import idempotency
from appliance.server.http.idempotency import MAX_ANSWER_BYTES, SharedAnswer

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from tests.server.conftest import Running, Serve

COMPLETIONS = "/v1/completions"
REPLAYED = "idempotent-replayed"
by_header = pytest.mark.parametrize("header", ["idempotency-key", "x-request-id"])


async def post(running: Running, headers: dict[str, str], **fields: Any) -> httpx.Response:
    body = {"prompt": "hi", "max_tokens": 2, **fields}
    return await running.http.post(COMPLETIONS, json=body, headers=headers)


def generated(running: Running) -> int:
    return running.state.engine.stats.generation_tokens_total


@by_header
@pytest.mark.parametrize("stream", [False, True])
async def test_who_asks_again_gets_the_same_answer(serve: Serve, header: str, stream: bool) -> None:
    async with serve() as running:
        first = await post(running, {header: "a-1"}, stream=stream)
        again = await post(running, {header: "a-1"}, stream=stream)
        assert (first.status_code, again.status_code) == (200, 200)
        assert again.text == first.text, "with its id and time"
        assert REPLAYED not in first.headers
        assert again.headers[REPLAYED] == "true"
        await until(running.idle)
        assert generated(running) == 2, "it was made once"
        other = await post(running, {header: "a-2"}, stream=stream)
        assert other.text != first.text
        if header == "x-request-id":
            assert first.headers[header] == again.headers[header] == "a-1"


async def test_what_fails_before_it_is_followed_runs_for_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers = {"idempotency-key": "one"}
    async with serve() as running:
        with monkeypatch.context() as broken:

            async def fails(*_: object, **__: object) -> None:
                raise ValueError("before anything is sent")

            broken.setattr(SharedAnswer, "follow", fails)
            answer = await post(running, headers, ignore_eos=True, max_tokens=300)
            assert answer.status_code == 500
            assert running.server.num_open == 0
            assert running.idle()
        assert (await post(running, headers)).status_code == 200, "its key is free"


async def test_two_at_once_are_one_and_outlive_the_first_client(serve: Serve) -> None:
    body = {"prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": 300}
    headers = {"idempotency-key": "one"}
    async with serve("step_seconds=0.005") as running:
        http = running.http
        async with http.stream("POST", COMPLETIONS, json=body, headers=headers) as second:
            # Whichever arrives first, both get the whole answer.
            async with http.stream("POST", COMPLETIONS, json=body, headers=headers) as first:
                await anext(first.aiter_bytes())
            text = (await second.aread()).decode()
        assert text.endswith("data: [DONE]\n\n")
        assert text.count("data: ") > 300
        assert first.headers[REPLAYED] == "true"
        await until(running.idle)
        assert generated(running) == 300


async def test_an_answer_that_nobody_waits_for_ends_and_is_not_kept(serve: Serve) -> None:
    fields = {"stream": True, "ignore_eos": True, "max_tokens": 400}
    async with serve("step_seconds=0.01") as running:
        request = {"json": {"prompt": "hi", **fields}, "headers": {"x-request-id": "gone"}}
        async with running.http.stream("POST", COMPLETIONS, **request) as first:  # type: ignore[arg-type]
            async for _ in first.aiter_bytes():
                break
        await until(running.idle)
        assert generated(running) < 400
        again = await post(running, {"x-request-id": "gone"}, max_tokens=3)
        assert again.status_code == 200
        assert REPLAYED not in again.headers


async def test_another_request_under_the_same_key(serve: Serve) -> None:
    async with serve() as running:
        assert (await post(running, {"idempotency-key": "k"})).status_code == 200
        refused = await post(running, {"idempotency-key": "k"}, max_tokens=3)
        assert refused.status_code == 422
        assert refused.json()["error"]["code"] == "idempotency_key_reused"
        assert (await post(running, {"x-request-id": "k"})).status_code == 200
        other = await post(running, {"x-request-id": "k"}, max_tokens=3)
        assert other.status_code == 200, "what a proxy gives a whole trace is no promise"
        assert REPLAYED not in other.headers
        for key in ("", "x" * 256):
            wrong = await post(running, {"idempotency-key": key})
            assert wrong.json()["error"]["code"] == "invalid_idempotency_key"


async def test_failures_are_not_repeated(serve: Serve) -> None:
    async with serve() as running:
        for _ in range(2):
            refused = await post(running, {"idempotency-key": "k"}, temperature=-1)
            assert refused.status_code == 400
            assert REPLAYED not in refused.headers
        large = b'{"prompt": "' + b"x" * (3 << 20) + b'"}'
        headers = {"idempotency-key": "l", "content-type": "application/json"}
        response = await running.http.post(COMPLETIONS, content=large, headers=headers)
        assert response.status_code == 413


async def test_holders_of_other_keys_do_not_share(serve: Serve) -> None:
    keys = {"anna": "key-of-anna", "bert": "key-of-bert"}
    async with serve(server={"api_keys": keys}) as running:
        answers = [
            await post(running, {"x-api-key": key, "idempotency-key": "same"})
            for key in (*keys.values(), keys["anna"])
        ]
        assert answers[0].text != answers[1].text
        assert answers[0].text == answers[2].text


async def call(app: Any, key: str) -> list[Message]:
    scope: Scope = {
        "type": "http", "method": "POST", "path": "/x", "query_string": b"",
        "state": {"key_name": ""},
        "headers": [(b"idempotency-key", key.encode()), (b"content-type", b"application/json")],
    }  # fmt: skip
    received = [{"type": "http.request", "body": b"{}", "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Any:
        if received:
            return received.pop()
        return await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


def answering(num_bytes: int, calls: list[int]) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append(num_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            await send(
                {"type": "http.response.body", "body": b"x" * (num_bytes // 4), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


async def test_what_is_kept_is_bounded_in_number_bytes_and_time() -> None:
    now, calls = [0.0], list[int]()
    kept = idempotency.Idempotency(
        answering(2**20, calls), max_body_bytes=100, clock=lambda: now[0]
    )
    for number in range(300):
        assert sum(len(one.get("body", b"")) for one in await call(kept, str(number))) == 2**20
        assert len(kept.answers) <= idempotency.MAX_ANSWERS
        assert sum(one.num_bytes for one in kept.answers.values()) <= idempotency.MAX_BYTES
    assert len(calls) == 300
    await call(kept, "299")
    assert len(calls) == 300
    now[0] = idempotency.KEEP_SECONDS + 1
    await call(kept, "299")
    assert len(calls) == 301


async def test_an_answer_too_large_to_keep_is_sent_all_the_same() -> None:
    calls: list[int] = []
    kept = idempotency.Idempotency(answering(2 * MAX_ANSWER_BYTES, calls), max_body_bytes=100)
    for count in (1, 2):
        sent = await call(kept, "k")
        assert sum(len(one.get("body", b"")) for one in sent) == 2 * MAX_ANSWER_BYTES
        assert len(calls) == count
        assert not kept.answers


async def test_what_fails_before_it_answers_fails_for_its_client() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError

    kept = idempotency.Idempotency(app, max_body_bytes=100)
    with pytest.raises(ZeroDivisionError):
        await call(kept, "k")
    assert not kept.answers
