"""Futures that wait for the engine: to be ready, or to send a sequence's block table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from appliance.engine.nouns.messages import Table


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
