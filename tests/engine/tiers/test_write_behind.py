"""Time that steps give the disk: never more than their share, whatever a block takes and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from support.simulation.virtual_runner import Clock

from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.tiers.write_behind import BUSY_SHARE, MAX_PENDING, WriteBehind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.moves import BlockSave


@dataclass
class CountedDisk:
    """A disk that uses processor seconds for each block while time passes.

    Attributes:
        thread_seconds: processor seconds for the next block.
        cpu_seconds: processor seconds so far.
        touched: hashes whose time of use was recorded.
    """

    thread_seconds: float = 0.0
    cpu_seconds: float = 0.0
    touched: list[bytes] = field(default_factory=list)
    is_writing: bool = True
    files: set[bytes] = field(default_factory=set)
    left: float = 0.0  # of the blocks that were handed over

    def __contains__(self, content: bytes) -> bool:
        return content in self.files

    @property
    def is_done(self) -> bool:
        return self.left == 0.0

    def wait_for_room(self, seconds: float, *, for_all: bool = False) -> bool:
        self.work(self.left)
        return True

    def touch(self, stamps: Sequence[tuple[bytes, int]]) -> None:
        self.touched += [content for content, _ in stamps]

    def write(self, content: bytes, saved: SavedBlock, stamp_ns: int) -> None:
        assert content not in self.files
        self.files.add(content)
        self.left += self.thread_seconds

    def work(self, seconds: float) -> None:
        """Let time pass."""
        done = min(seconds, self.left)
        self.left -= done
        self.cpu_seconds += done


class Index:
    """A cache that holds every block."""

    def get(self, content: bytes) -> int:
        return 0


class Blocks:
    index = Index()
    block_size = 16


class Bench:
    """Steps of any length while blocks always wait."""

    def __init__(self) -> None:
        self.clock, self.disk = Clock(), CountedDisk()
        self.copy_seconds = 0.0
        self.hand_over = 0.0  # seconds that the steps' thread has spent on hand-overs
        self.writes = WriteBehind(Blocks(), self.disk, self.save, self.clock.read)  # type: ignore[arg-type]
        numbers = count()
        self.writes.offer([next(numbers).to_bytes(16, "big") for _ in range(5000)])

    def save(self, saves: Sequence[BlockSave]) -> tuple[SavedBlock, ...]:
        assert len(saves) == 1
        self.clock.now += self.copy_seconds
        self.hand_over += self.copy_seconds
        return (SavedBlock(b""),)

    @property
    def taken(self) -> float:
        """Processor seconds spent so far."""
        return self.hand_over + self.disk.cpu_seconds

    def step(self, seconds: float) -> float:
        """Run a step; return the processor seconds that writing took during and after it."""
        before = self.taken
        self.disk.work(seconds)
        self.clock.now += seconds
        self.writes.after_step()
        return self.taken - before


SECONDS = st.floats(1e-6, 0.5)
COSTS = st.tuples(st.floats(0, 0.01), st.floats(0, 0.05))
STEPS = st.lists(st.tuples(SECONDS, COSTS, st.booleans()), min_size=1, max_size=60)


@given(STEPS)
def test_no_row_of_steps_gives_more_than_its_share_and_a_block(
    steps: list[tuple[float, tuple[float, float], bool]],
) -> None:
    """Not even the steps behind others that gave nothing: what is owed may be two blocks at most,
    the one that was handed over before the first step and the last one."""
    bench = Bench()
    lengths, taken, dearest = [], [], 0.0
    for seconds, (copy, thread), idles in steps:
        bench.copy_seconds, bench.disk.thread_seconds = copy, thread
        dearest = max(dearest, copy + thread)
        if idles:
            bench.writes.idle()
            bench.disk.work(1.0)  # long enough to write everything
            bench.writes.idle()
            bench.disk.work(1.0)
        lengths.append(seconds)
        taken.append(bench.step(seconds))
    for first in range(len(steps)):
        for last in range(first + 1, len(steps) + 1):
            given = BUSY_SHARE * sum(lengths[first:last])
            assert sum(taken[first:last]) <= given + 2 * dearest + 1e-9


def test_in_the_long_run_the_share_is_used() -> None:
    bench = Bench()
    bench.copy_seconds, bench.disk.thread_seconds = 0.00003, 0.0003
    taken = sum(bench.step(0.0025) for _ in range(4000))
    assert 0.9 * BUSY_SHARE <= taken / 10.0 <= BUSY_SHARE + 0.0001


def test_answers_behind_a_long_prompt_do_not_pay_for_what_it_did_not_use() -> None:
    """A prompt's few long steps could spare a hundred blocks; its answer's steps are short."""
    bench = Bench()
    bench.copy_seconds, bench.disk.thread_seconds = 0.00005, 0.0005
    for _ in range(4):
        bench.step(0.3)
    taken = sum(bench.step(0.0025) for _ in range(128))
    assert taken <= BUSY_SHARE * 128 * 0.0025 + 2 * 0.00055


def test_whatever_else_the_thread_does_is_paid_for_first() -> None:
    """Examples are a sweep over all files, or touching the blocks of a long conversation."""
    bench = Bench()
    bench.disk.thread_seconds = 0.0003
    bench.disk.cpu_seconds += 0.1
    for _ in range(49):
        bench.step(0.1)
    assert not bench.disk.files
    for _ in range(2):
        bench.step(0.1)
    assert bench.disk.files


def test_an_idle_moment_writes_much_and_owes_nothing() -> None:
    bench = Bench()
    bench.disk.thread_seconds = 0.001
    for _ in range(100):
        bench.writes.idle()
    assert len(bench.disk.files) == 800
    bench.disk.work(1.0)  # the last of them, before anything runs
    bench.writes.idle()
    bench.disk.left = 0.0
    bench.step(0.01)
    assert len(bench.disk.files) == 809


def test_more_than_can_wait_is_dropped_oldest_first() -> None:
    bench = Bench()
    bench.writes.offer([number.to_bytes(16, "little") for number in range(1, MAX_PENDING)])
    assert len(bench.writes) == MAX_PENDING
    assert bench.writes.num_dropped == 4999
    bench.step(1.0)
    assert bench.disk.files == {(4999).to_bytes(16, "big")}


def test_what_is_there_already_is_only_noted() -> None:
    bench = Bench()
    bench.step(1.0)
    (written,) = bench.disk.files
    bench.writes.offer([written, b"new"])
    assert bench.disk.touched == [written]
    assert len(bench.writes) == 5000
