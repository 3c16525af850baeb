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
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(guard) for guard in guards]
    try:
        done, _ = await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task in done else await done.pop()
    finally:
        for one in (task, *watches):
            one.cancel()
        await asyncio.gather(task, *watches, return_exceptions=True)


async def disconnect(receive: Receive) -> NoReturn:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError
