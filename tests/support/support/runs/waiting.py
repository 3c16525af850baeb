"""Wait in a test until something is true: the one way, with a limit that only a hang reaches.

A test does not sleep for what another process or thread does, and its verdict does not hang on how
long anything took: the machine may be busy with other work.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

import psutil

LIMIT = 300.0  # seconds; with a seventh of a core 60 were too few
PAUSE = 0.005

Found = TypeVar("Found")
Words = str | Callable[[], str]


def wait_until(condition: Callable[[], Found], words: Words = "") -> Found:
    """Wait until a condition holds.

    Args:
        condition: looks at what another process or thread does.
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
    """Wait until a condition holds, which may itself be awaited, while the loop goes on.

    Args:
        condition: looks at what another process, thread or task does.
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
    """Whether a process runs no more, collected by its parent or not.

    An orphan stays a zombie where the first process of the container collects nobody.
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
