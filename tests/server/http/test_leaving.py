"""A client that disconnects leaves the queue, its prefill and its answer, on every route.

The routes come from the server's own table, so that a new one is tried automatically.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from support.runs.waiting import until
from support.server.every_route import Call, Client, every_call

from appliance.config import ServerConfig
from appliance.server.app import create_app
from appliance.server.models.state import ServerState

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.conftest import Running, Serve

_ALL = [call for call in every_call(create_app(ServerState(ServerConfig()))) if call.body]
CALLS = [call.asking("hello, " * 20, 300) for call in _ALL]
# This includes requests for several answers.
CALLS += [
    replace(call, body={**(call.body or {}), **several})
    for call, several in product(
        [one for one in CALLS if one.path in ("/v1/completions", "/v1/chat/completions")],
        ({"n": 3}, {"n": 2, "use_beam_search": True, "temperature": 0}),
    )
    if not (call.body or {})["stream"] or "use_beam_search" not in several  # those come whole
]
# This includes answers that another client could get.
CALLS += [replace(call, again=True) for call in CALLS if "stream" in (call.body or {})][:2]
GENERATES = {
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
    "/api/chat", "/api/generate",
}  # fmt: skip
READS = {"/v1/embeddings", "/api/embed", "/api/embeddings", "/rerank", "/score"}


class Asked:
    """A request whose client can disconnect; its answer must then end by itself."""

    def __init__(self, running: Running, call: Call) -> None:
        headers = {"idempotency-key": str(id(self))} if call.again else {}
        self._client = client = Client(call, headers)
        self.task = asyncio.ensure_future(running.app(client.scope, client.receive, client.send))

    def is_there_or_done(self, is_there: Callable[[], bool]) -> bool:
        return is_there() or self.task.done()

    async def leave(self) -> None:
        self._client.gone.set()
        await self._client.ended(self.task)


async def leave_all(running: Running, is_there: Callable[[], bool], calls: list[Call]) -> set[str]:
    """Send one request after another, and disconnect each once a condition holds.

    Returns:
        Paths of the requests that met the condition; the others were answered before.
    """
    engine, found = running.engine, set()
    before = engine.num_running, engine.num_waiting
    for call in calls:
        asked = Asked(running, call)
        try:
            await until(partial(asked.is_there_or_done, is_there))
            if asked.task.done():
                continue
            found.add(call.path)

            def was_aborted(aborted: int = engine.stats.aborted_total) -> bool:
                return engine.stats.aborted_total > aborted

            await asked.leave()
            await until(lambda: (engine.num_running, engine.num_waiting) == before)
            await until(was_aborted)
        except Exception as error:
            error.add_note(f"{call} with {call.body}")
            raise
    return found


async def test_in_the_queue(serve: Serve) -> None:
    async with serve("holds_at=8", max_num_seqs=1) as running:
        engine = running.engine
        first = Asked(running, Call("POST", "/v1/completions", {"prompt": "a", "max_tokens": 99}))
        await until(lambda: engine.stats.generation_tokens_total == 7)  # as much as it may
        assert await leave_all(running, lambda: engine.num_waiting > 0, CALLS) == GENERATES | READS
        assert engine.stats.generation_tokens_total == 7
        await first.leave()
        await until(running.idle)


async def test_in_the_prefill(serve: Serve) -> None:
    async with serve("holds_at=8", max_num_seqs=8, max_num_batched_tokens=16) as running:
        engine = running.engine

        def is_read() -> bool:
            return engine.num_running > 0 and engine.num_waiting == 0

        assert await leave_all(running, is_read, CALLS) == GENERATES | READS
        assert engine.stats.generation_tokens_total == 0
        await until(running.idle)


async def test_while_it_is_answered(serve: Serve) -> None:
    calls = [call for call in CALLS if call.path in GENERATES]
    async with serve("holds_at=250", max_num_seqs=8) as running:
        engine = running.engine
        held = 0

        def is_answered() -> bool:
            return engine.stats.generation_tokens_total > held and engine.num_running > 0

        for call in calls:
            held = engine.stats.generation_tokens_total
            assert await leave_all(running, is_answered, [call]), call
        await until(running.idle)
