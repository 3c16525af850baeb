"""Futures that wait for the engine: to be ready, to send a block table, to read an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import AdapterAnswer, LoadAdapter, Table, UnloadAdapter
from appliance.engine.process.supervisor import EngineState
from appliance.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.request import AdapterRef
    from appliance.engine.process.supervisor import Supervisor


class ReadyWaiters:
    """Waits until the engine is ready, or will not be soon."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Return at the next `wake`, or raise its error."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def wake(self, error: Exception | None = None) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


class TableFetches:
    """Requested block tables; callers that request the same one share its answer.

    Args:
        ask: sends the request for a request id and a sequence index.
    """

    def __init__(self, ask: Callable[[str, int], object]) -> None:
        self._ask = ask
        self._asked: dict[tuple[str, int], asyncio.Future[Table]] = {}

    async def fetch(self, request_id: str, index: int) -> Table:
        """Return one sequence's table, as between two steps."""
        asked = self._asked.get((request_id, index))
        if asked is None:
            asked = asyncio.get_running_loop().create_future()
            self._asked[request_id, index] = asked
            self._ask(request_id, index)
        # Cancelling one caller must not cancel the answer for others.
        return await asyncio.shield(asked)

    def answer(self, table: Table) -> None:
        asked = self._asked.pop((table.request_id, table.index), None)
        if asked is not None and not asked.done():
            asked.set_result(table)

    def give_up(self) -> None:
        """Answer all requests with empty tables."""
        for request_id, index in list(self._asked):
            self.answer(Table(request_id=request_id, index=index))


class AdapterCalls:
    """Adapters being read."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._asked: dict[AdapterRef, asyncio.Future[AdapterAnswer]] = {}

    async def load(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; wakes a sleeping engine.

        Raises:
            RequestError: the adapter is unusable.
        """
        asked = self._asked.get(ref)
        if asked is None:
            asked = asyncio.get_running_loop().create_future()
            self._asked[ref] = asked
            if self._supervisor.state is EngineState.READY:
                self._supervisor.send(LoadAdapter(ref))
            else:
                self._supervisor.wake()
        # Cancelling one caller must not cancel the answer for others.
        answer = await asyncio.shield(asked)
        if answer.error:
            raise RequestError(answer.error, param="lora_path")

    def unload(self, ref: AdapterRef) -> None:
        """Forget an adapter after the last request that uses it."""
        self._supervisor.send(UnloadAdapter(ref))

    @property
    def is_asked(self) -> bool:
        return bool(self._asked)

    def begin(self) -> None:
        """Send the requests that arrived before the engine was ready."""
        for ref in self._asked:
            self._supervisor.send(LoadAdapter(ref))

    def take(self, answers: Iterable[AdapterAnswer]) -> None:
        """Pass answers on to their callers."""
        for answer in answers:
            asked = self._asked.pop(answer.ref, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)

    def forget(self) -> None:
        """End all calls after the engine has ended."""
        self.take([AdapterAnswer(ref, "the engine ended while it read it") for ref in self._asked])
