from __future__ import annotations

import asyncio
import select
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from support.runs.waiting import until

from appliance.engine.nouns.messages import Abort, Progress, StepReport
from appliance.engine.process.child import EngineConnection
from appliance.engine.process.framing import FrameDecoder, FrameError, encode_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from appliance.engine.nouns.messages import FromEngine

STEP = StepReport(started=("a",))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = await EngineConnection.over(ours)
    with theirs:
        yield connection, theirs
        connection.close()
        await asyncio.sleep(0)


async def test_messages_are_kept_until_they_are_asked_for() -> None:
    async with connected() as (connection, engine):
        engine.sendall(encode_frame(Progress("a", 1, 2)) + encode_frame(Progress("b", 2, 2)))
        waiting = asyncio.create_task(connection.receive())
        assert await waiting == Progress("a", 1, 2)
        assert await connection.receive() == Progress("b", 2, 2)
        engine.shutdown(socket.SHUT_WR)
        assert await connection.receive() is None


async def test_messages_are_passed_on_also_those_that_came_before() -> None:
    async with connected() as (connection, engine):
        engine.sendall(encode_frame(Progress("a", 1, 2)) + encode_frame(STEP))
        assert await connection.receive() == Progress("a", 1, 2)
        found: list[FromEngine] = []
        passing = asyncio.create_task(connection.pass_on(found.append))
        await until(lambda: found == [STEP])
        whole = encode_frame(STEP)
        engine.sendall(whole[:5])
        await until(lambda: bytes(connection.decoder.rest) == whole[:5])
        engine.sendall(whole[5:])
        engine.close()
        await passing
        assert found == [STEP, STEP]
        assert await connection.receive() is None
        connection.send(Abort("nobody hears it"))


async def test_what_is_no_message_is_an_error_for_whoever_listens() -> None:
    async with connected() as (connection, engine):
        passing = asyncio.create_task(connection.pass_on(lambda message: None))
        await asyncio.sleep(0)
        engine.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(FrameError, match="a frame of"):
            await passing
        engine.sendall(encode_frame(STEP))
        await asyncio.sleep(0)
        with pytest.raises(FrameError, match="a frame of"):
            await connection.receive()


async def test_an_error_of_the_listener_ends_the_listening() -> None:
    async with connected() as (connection, engine):
        calls = 0

        def fail(message: FromEngine) -> None:
            nonlocal calls
            calls += 1
            raise ValueError("a bug")

        passing = asyncio.create_task(connection.pass_on(fail))
        await asyncio.sleep(0)
        engine.sendall(encode_frame(STEP) * 3)
        with pytest.raises(ValueError, match="a bug"):
            await passing
        assert calls == 1


async def test_messages_go_out() -> None:
    async with connected() as (connection, engine):
        connection.send(Abort("r"))
        await until(lambda: bool(select.select([engine], [], [], 0)[0]))
        decoder: FrameDecoder[Abort] = FrameDecoder(Abort)
        assert decoder.feed(engine.recv(1000)) == [Abort("r")]
