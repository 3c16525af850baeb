"""Watches for clients that disconnect while a server works for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from starlette.types import Receive

ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """The client closed the connection."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run work for a waiting client; cancel it and raise ClientGoneError if the client leaves."""
    return await guarded(work, disconnect(receive))


async def guarded(
    work: Coroutine[Any, Any, ResultT], *guards: Coroutine[Any, Any, NoReturn]
) -> ResultT:
    """Return the result of work, unless a guard raises first."""
    tasks: list[asyncio.Task[Any]] = []
    try:
        for one in (work, *guards):
            tasks.append(asyncio.ensure_future(one))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first = tasks[0] if tasks[0] in done else done.pop()
        result: ResultT = first.result()  # a guard has none: it raises
        return result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def disconnect(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError
