"""Counts what a call costs, and judges how that grows with its input.

Costs are counted in bytecode instructions, which no busy machine changes. Comparing and hashing in
C (a search in a list, a set that is built) counts too where the texts are `CountedText`, whose
comparisons are Python. Copying of texts and work in Rust do not count: `seconds_of` measures those,
for runs by hand.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

TIMES = (1, 2, 4, 8)
ENDS = (TIMES[0], TIMES[-1])  # which decide; those between show how it grows
# Eight times the input may cost 8 * log(8n) / log(n) times as much, and half as much again;
# growth with the power 1.5 costs 23 times as much, with the square 64 times.
MOST = 15.0
MOST_MEMORY = 10.0
SLACK = 3000  # instructions that are no matter of the input
SLACK_BYTES = 100_000


class CountedText(str):
    """A text whose comparisons count as instructions."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


def instructions_of(call: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call executes, in this thread."""
    count = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        return local

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def bytes_of(call: Callable[[], object]) -> int:
    """Return the most bytes that Python's allocator holds for a call."""
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def seconds_of(call: Callable[[], object]) -> float:
    """Return the least processor seconds of three calls."""
    found = []
    for _ in range(3):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


def check_growth(make: Callable[[int], Callable[[], object]], size: int, *, timed: bool) -> None:
    """Fail if work grows faster than n log n, or memory faster than n.

    Args:
        make: prepares a call whose input has a size; what it does itself does not count.
        size: the smallest.
        timed: measures processor seconds too, with larger inputs.
    """
    work = [instructions_of(make(size * times)) for times in ENDS]
    if work[-1] > MOST * work[0] + SLACK:
        work = [instructions_of(make(size * times)) for times in TIMES]
        raise AssertionError(f"instructions at 1, 2, 4, 8 times {size}: {work}")
    memory = [bytes_of(make(size * times)) for times in ENDS]
    assert memory[1] <= MOST_MEMORY * memory[0] + SLACK_BYTES, f"bytes at 1, 8 times: {memory}"
    if timed:
        seconds = [seconds_of(make(16 * size * times)) for times in ENDS]
        assert seconds[-1] <= 2 * MOST * seconds[0] + 0.1, f"seconds: {seconds}"
