"""A disk under a virtual clock, in place of `DiskTier`: slow, full or with damaged files.

A hash stands for one content for ever, whoever writes it: each write checks that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from appliance.engine.tiers.disk_store import DiskCounters
from appliance.engine.tiers.disk_tier import MAX_QUEUED, ReadJob

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence as Sequences

    from support.simulation.virtual_runner import Clock

    from appliance.engine.nouns.moves import SavedBlock
    from appliance.engine.nouns.sequence import Sequence

READ_SECONDS, WRITE_SECONDS = 0.02, 0.004
CPU_SECONDS = 0.0001  # processor seconds to write a block
SLOW = 25.0  # factor of a slow disk's times
PAUSE_SECONDS = 2.0


class VirtualDisk:
    """Files that outlive the engine.

    Args:
        clock: advances while the engine waits.
        capacity: blocks.
        noise: chooses the files that are damaged.

    Attributes:
        fault: the current fault: "full", "slow" or "damaged"; empty: none.
        counters: as `DiskStore` has them.
    """

    def __init__(self, clock: Clock, capacity: int, noise: random.Random) -> None:
        self.fault = ""
        self.trouble = ""
        self.counters = DiskCounters()
        self.capacity = capacity
        self.unfinished: list[ReadJob] = []
        self._clock = clock
        self._noise = noise
        self._files: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._truth: dict[bytes, bytes] = {}
        self._queue: deque[tuple[float, bytes, SavedBlock]] = deque()  # with the time of each write
        self._jobs: deque[tuple[float, ReadJob]] = deque()  # with the time of its end
        self._resume = 0.0

    @property
    def store(self) -> VirtualDisk:
        """See `DiskTier`."""
        return self

    def __contains__(self, content: bytes) -> bool:
        return content in self._files

    def __len__(self) -> int:
        return len(self._files)

    @property
    def is_writing(self) -> bool:
        """See `DiskTier`."""
        self._write_some()
        return not self.trouble or self._clock.now >= self._resume

    @property
    def cpu_seconds(self) -> float:
        """See `DiskTier`."""
        return CPU_SECONDS * self.counters.written

    @property
    def is_done(self) -> bool:
        """See `DiskTier`."""
        self._write_some()
        return not self._queue

    @property
    def has_room(self) -> bool:
        """See `DiskTier`."""
        self._write_some()
        return len(self._queue) < MAX_QUEUED

    def wait_for_room(self, seconds: float) -> bool:
        """See `DiskTier`."""
        if not self.has_room:
            self._clock.now += seconds
        return self.has_room

    def write(self, content: bytes, saved: SavedBlock, stamp_ns: int) -> None:
        """See `DiskTier`."""
        assert self.has_room
        begin = self._queue[-1][0] if self._queue else self._clock.now
        self._queue.append((begin + self._takes(WRITE_SECONDS), content, saved))

    def touch(self, stamps: Sequences[tuple[bytes, int]]) -> None:
        """See `DiskTier`; the tail is older than the head."""
        for content, _ in reversed(stamps):
            if content in self._files:
                self._files.move_to_end(content)

    def read(self, hashes: list[bytes], sequence: Sequence) -> ReadJob:
        """See `DiskTier`."""
        job = ReadJob(hashes, sequence)
        self.unfinished.append(job)
        begin = max(self._clock.now, self._jobs[-1][0] if self._jobs else 0.0)
        self._jobs.append((begin + self._takes(READ_SECONDS), job))
        return job

    def take_read(self) -> list[ReadJob]:
        """See `DiskTier`."""
        done = []
        while self._jobs and self._jobs[0][0] <= self._clock.now:
            job = self._jobs.popleft()[1]
            self._find(job)
            self.unfinished.remove(job)
            done.append(job)
        return done

    def wait_for_read(self, seconds: float) -> None:
        """See `DiskTier`."""
        self._clock.now += seconds

    def lose_engine(self) -> None:
        """The process died: discard its pending writes and reads."""
        self.unfinished.clear()
        self._jobs.clear()
        self._queue.clear()
        self.trouble = ""

    def _takes(self, seconds: float) -> float:
        return seconds * (SLOW if self.fault == "slow" else 1.0)

    def _find(self, job: ReadJob) -> None:
        for content in job.hashes:
            if job.cancelled or content not in self._files:
                return
            if self.fault == "damaged" and self._noise.random() < 0.5:
                del self._files[content]
                self.counters.corrupt += 1
                return
            self.counters.read += 1
            job.found.append((content, bytearray(self._files[content])))

    def _write_some(self) -> None:
        while self._queue and self._queue[0][0] <= self._clock.now:
            _, content, saved = self._queue.popleft()
            if self.fault == "full":
                self.trouble, self._resume = "full", self._clock.now + PAUSE_SECONDS
                continue
            data = bytes(saved.read())
            assert self._truth.setdefault(content, data) == data, "two contents under one hash"
            self._files[content] = data
            self.counters.written += 1
            self.trouble = ""
            while len(self._files) > self.capacity:
                self._files.popitem(last=False)
                self.counters.evicted += 1
