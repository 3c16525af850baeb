"""Counts the cost of a call, and judges how it grows with the input.

The cost is the number of executed lines of Python, which a busy machine does not change. Comparing
and hashing in C (a search in a list, building a set) counts too for texts of `CountedText`, whose
comparisons are Python. Other work of C and Rust, such as copying and matching, shows only in
processor time: that is compared within one run, with inputs that are large enough for it.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

TIMES = (1, 2, 4, 8)
ENDS = (TIMES[0], TIMES[-1])  # these decide; the sizes between show how the cost grows
# An input eight times as large may cost 8 * log(8n) / log(n) times as much, and a third more;
# growth with the power 1.5 costs 23 times as much, with the square 64 times.
MOST = 14.0
MOST_MEMORY = 10.0
ATTEMPTS = 3
SLACK = 500  # lines that do not depend on the input
SLACK_BYTES = 100_000
SHORT = 0.004  # processor seconds, too few to tell anything
LARGEST = 1024  # times the smallest input

Make = Callable[[int], Callable[[], object]]


class CountedText(str):
    """A text whose comparisons count as lines."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


def lines_of(call: Callable[[], object]) -> int:
    """Return how many lines of Python a call executes, in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def bytes_of(call: Callable[[], object]) -> int:
    """Return the most bytes that Python's allocator holds for a call."""
    gc.collect(0)
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds_of(call: Callable[[], object], runs: int = 1) -> float:
    """Return the least processor seconds of some calls, in this thread."""
    found = []
    for _ in range(runs):
        begin = time.thread_time()
        call()
        found.append(time.thread_time() - begin)
    return min(found)


def check_growth(make: Make, size: int, enough: float) -> None:
    """Fail if work grows faster than n log n, or memory faster than n.

    Args:
        make: prepares a call with an input of a size; the preparation does not count.
        size: the smallest.
        enough: processor seconds of the largest input. Copying a whole list or text for each of its
            parts exceeds the rest of the work only with large inputs.
    """
    work = [lines_of(make(size * times)) for times in ENDS]
    if work[-1] > MOST * work[0] + SLACK:
        work = [lines_of(make(size * times)) for times in TIMES]
        raise AssertionError(f"lines at 1, 2, 4, 8 times {size}: {work}")
    _repeated(lambda: _check_bytes(make, size))
    _repeated(lambda: _check_seconds(make, size, enough))


def _repeated(check: Callable[[], None]) -> None:
    """Fail if a check fails each time: another thread's work or memory may fail it once."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(AssertionError):
            check()
            return
    check()


def _check_bytes(make: Make, size: int) -> None:
    memory = [bytes_of(make(size * times)) for times in ENDS]
    assert memory[1] <= MOST_MEMORY * memory[0] + SLACK_BYTES, f"bytes at 1, 8 times: {memory}"


def _check_seconds(make: Make, size: int, enough: float) -> None:
    """Double the input until it takes long enough; two steps in a row must not be too steep."""
    found: list[float] = []
    calls: list[Callable[[], object]] = []
    steep = 0
    gc.collect()
    gc.disable()  # a garbage collection would run for one size and not for another
    try:
        while size << len(found) <= size * LARGEST:
            calls.append(make(size << len(found)))
            found.append(seconds_of(calls[-1]))
            if len(found) > 3 and found[-1] >= SHORT:
                if found[-1] > MOST * found[-4]:
                    found[-1] = min(found[-1], seconds_of(calls[-1], 3))
                    found[-4] = min(found[-4], seconds_of(calls[-4], 5))
                steep = steep + 1 if found[-1] > MOST * found[-4] else 0
                assert steep < 2, f"seconds at {size} and each twice as much: {found}"
            has_ended = (
                len(found) > 5 and found[-1] < 1.2 * found[-3]
            )  # the server refuses too large an input
            if (found[-1] >= enough and not steep and len(found) > 3) or has_ended:
                return
    finally:
        gc.enable()
