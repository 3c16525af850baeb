"""Owns the tasks and threads that live as long as the server or an engine.

Logs each failure when it happens. What failed starts again, or its owner ends what cannot do
without it. A leaf: imports nothing of ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

ToldT = TypeVar("ToldT")

PAUSE_SECONDS = 1.0  # before work that failed starts again

logger = logging.getLogger(__name__)


def start_task(
    work: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    on_end: Callable[[Exception | None], object] | None = None,
) -> asyncio.Task[None]:
    """Start a task that runs until it is cancelled.

    Args:
        work: started again after it raised, unless there is `on_end`.
        on_end: called once if the work returns or raises, with its error; the owner then ends what
            cannot do without it.
    """
    return asyncio.create_task(_keep_on(work, name, on_end), name=name)


async def _keep_on(
    work: Callable[[], Coroutine[Any, Any, None]],
    name: str,
    on_end: Callable[[Exception | None], object] | None,
) -> None:
    failure: Exception | None = None
    while True:
        try:
            await work()
            break
        except Exception as error:
            failure = error
            logger.exception("the task %s failed%s", name, "" if on_end else "; it starts again")
        if on_end is not None:
            break
        await asyncio.sleep(PAUSE_SECONDS)
    if on_end is not None:
        on_end(failure)


def start_thread(work: Callable[[], None], name: str) -> Thread:
    """Start a daemon thread that runs `work` until it returns, again after it raised."""
    thread = Thread(target=_run, args=(work, name), name=name, daemon=True)
    thread.start()
    return thread


def _run(work: Callable[[], None], name: str) -> None:
    while True:
        try:
            return work()
        except Exception:
            logger.exception("the thread %s failed; it starts again", name)
        time.sleep(PAUSE_SECONDS)


def tell(observers: Iterable[Callable[[ToldT], object]], news: ToldT) -> None:
    """Call each observer; one that raises ends neither the others nor the caller."""
    for observe in observers:
        try:
            observe(news)
        except Exception:
            logger.exception("the observer %s failed", getattr(observe, "__qualname__", observe))
