"""Waits in a test until something is true: the only way, with a limit that only a hang reaches.

A test does not sleep for what another process or thread does, and its verdict does not depend on
how long anything took: the machine may be busy with other work.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import psutil

LIMIT = 300.0  # seconds; on a seventh of a core 60 were too few
PAUSE = 0.005

Found = TypeVar("Found")
Words = str | Callable[[], str]


def wait_until(condition: Callable[[], Found], words: Words = "") -> Found:
    """Wait until a condition holds.

    Args:
        condition: observes another process or thread.
        words: for the failure, should it never hold; without them, the condition's own source.

    Returns:
        The condition's first true value.
    """
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < end, _in_vain(condition, words)
        time.sleep(PAUSE)
    return found


@overload
async def until(condition: Callable[[], Awaitable[Found]], words: Words = ...) -> Found: ...


@overload
async def until(condition: Callable[[], Found], words: Words = ...) -> Found: ...


async def until(condition: Callable[[], Any], words: Words = "") -> Any:
    """Wait until a condition holds, while the loop goes on; the condition may be a coroutine.

    Args:
        condition: observes another process, thread or task.
        words: for the failure, should it never hold; without them, the condition's own source.

    Returns:
        The condition's first true value.
    """
    end = time.monotonic() + LIMIT
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, _in_vain(condition, words)
        await asyncio.sleep(PAUSE)


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, whether or not its parent has waited for it.

    An orphan stays a zombie if the container's first process does not wait for it.
    """
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _in_vain(condition: Callable[[], object], words: Words) -> str:
    if callable(words):
        words = words()
    try:
        words = words or inspect.getsource(condition).strip()
    except (OSError, TypeError):
        words = repr(condition)
    return f"waited for {LIMIT:.0f} seconds in vain: {words}"
