"""Requests that nobody would write, and connections that nobody ends: the server goes on."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from waiting import until

from tests.server.test_bad_fields import ROWS
from tests.server.test_bad_input import CHAT, CHAT_FIELDS, COMPLETIONS, USER

if TYPE_CHECKING:
    from tests.server.conftest import Running, Serve

pytestmark = pytest.mark.chaos
FIELDS = [(name, value) for _, name, value in ROWS] + CHAT_FIELDS
GOOD: list[tuple[str, Any]] = [("max_tokens", 2), ("stream", True), ("n", 2), ("seed", 1)]


def fuzzed(dice: random.Random) -> tuple[str, bytes]:
    """A path, and a body with some fields right and others wrong, perhaps damaged."""
    path = dice.choice([CHAT, COMPLETIONS])
    body: dict[str, Any] = {"messages": [USER], "prompt": "x", "max_tokens": 3}
    for _ in range(dice.randrange(4)):
        name, value = dice.choice(FIELDS if dice.random() < 0.6 else GOOD)
        body[name] = value
    data = bytearray(json.dumps(body).encode())
    if dice.random() < 0.3:
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
    return path, bytes(data)


async def check_health(running: Running, pid: int) -> None:
    await until(running.idle)
    assert running.state.engine.pid == pid, "the engine was not started anew"
    assert (await running.chat(max_tokens=1)).status_code == 200


async def test_no_fuzzed_request_is_a_failure_of_the_server(serve: Serve) -> None:
    dice = random.Random(17)
    headers = {"content-type": "application/json"}
    async with serve() as running:
        pid = running.state.engine.pid
        assert pid is not None
        statuses = set()
        for _ in range(1500):
            path, body = fuzzed(dice)
            response = await running.http.post(path, content=body, headers=headers)
            assert response.status_code < 500, (path, body, response.text)
            statuses.add(response.status_code)
        assert {200, 400} <= statuses
        await check_health(running, pid)


async def test_connections_that_say_nothing_leave_room_for_others(serve: Serve) -> None:
    async with serve(server={"max_connections": 64}) as running:
        pid = running.state.engine.pid
        assert pid is not None
        host, _, port = running.url.removeprefix("http://").partition(":")
        opened = []
        try:
            for number in range(200):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write((b"", b"POST /v1/chat", b"GET / HTTP/1.1\r\nHost: x")[number % 3])
                opened.append(writer)
            await check_health(running, pid)
        finally:
            for writer in opened:
                writer.transport.abort()
        await check_health(running, pid)
