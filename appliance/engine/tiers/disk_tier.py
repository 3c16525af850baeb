"""Reads and writes the disk in two threads; the engine's thread never waits for a file.

Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from appliance.long_lived import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Sequences

    from appliance.engine.nouns.moves import SavedBlock
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.tiers.disk_store import DiskStore

MAX_QUEUED = 8  # blocks that wait for the writer
PAUSE_SECONDS = 60.0  # without writing, after a disk error

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ReadJob:
    """Blocks of one sequence's chain, to read in order.

    Attributes:
        found: hash and bytes of blocks read, up to the first failure.
        cancelled: the sequence no longer waits.
    """

    hashes: list[bytes]
    sequence: Sequence
    found: list[tuple[bytes, bytearray]] = field(default_factory=list)
    cancelled: bool = False


class DiskTier:
    """A store of files, for the engine's thread to use without waiting.

    Attributes:
        trouble: why it writes nothing; empty if all is well.
    """

    def __init__(self, store: DiskStore) -> None:
        self.trouble = ""
        self._store = store
        self.resume_at = 0.0  # monotonic seconds
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._queued = 0
        self._written = threading.Condition()
        self._jobs: SimpleQueue[ReadJob | None] = SimpleQueue()
        self._read: deque[ReadJob] = deque()
        self._has_read = threading.Event()
        self.unfinished: list[ReadJob] = []
        self._tasks.put(store.sweep)
        writer = start_thread(self._run_writer, "kv-disk-writer")
        reader = start_thread(self._run_reader, "kv-disk-reader")
        self._threads = (writer, reader)
        assert writer.ident is not None, "it was started"
        self._writer_clock = time.pthread_getcpuclockid(writer.ident)

    @property
    def store(self) -> DiskStore:
        return self._store

    def __contains__(self, content: bytes) -> bool:
        return content in self._store

    @property
    def is_writing(self) -> bool:
        """True if it accepts blocks now."""
        return not self.trouble or time.monotonic() >= self.resume_at

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the writer thread so far; valid until `close`."""
        return time.clock_gettime(self._writer_clock)

    @property
    def is_done(self) -> bool:
        return self._queued == 0

    @property
    def has_room(self) -> bool:
        """True if it can take one more block now."""
        return self._queued < MAX_QUEUED

    def wait_for_room(self, seconds: float, *, for_all: bool = False) -> bool:
        """Wait until it can take a block, or all are written; return False on timeout."""
        most = 0 if for_all else MAX_QUEUED - 1
        with self._written:
            return self._written.wait_for(lambda: self._queued <= most, seconds)

    def write(self, content: bytes, saved: SavedBlock, stamp_ns: int) -> None:
        """Hand over a block to write; there must be room."""
        assert self.has_room
        with self._written:
            self._queued += 1
        self._tasks.put(lambda: self._write(content, saved, stamp_ns))

    def touch(self, stamps: Sequences[tuple[bytes, int]]) -> None:
        """Hand over the times of blocks' last use, in nanoseconds."""
        if stamps:
            self._tasks.put(lambda: self._touch(stamps))

    def read(self, hashes: list[bytes], sequence: Sequence) -> ReadJob:
        """Hand over blocks to read; `take_read` returns the finished job."""
        job = ReadJob(hashes, sequence)
        self.unfinished.append(job)
        self._jobs.put(job)
        return job

    def take_read(self) -> list[ReadJob]:
        """Return the finished jobs."""
        self._has_read.clear()
        done = []
        while self._read:
            done.append(self._read.popleft())
            self.unfinished.remove(done[-1])
        return done

    def wait_for_read(self, seconds: float) -> None:
        """Wait until a job is finished, for at most so many seconds."""
        self._has_read.wait(seconds)

    def close(self, seconds: float) -> None:
        """End both threads; unwritten blocks are lost."""
        end = time.monotonic() + seconds
        self._tasks.put(None)
        self._jobs.put(None)
        for job in self.unfinished:
            job.cancelled = True
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run_writer(self) -> None:
        # At the same priority as steps: a lower one could hold the GIL without a core, while steps
        # wait.
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except OSError as error:
                self._say(error.strerror or str(error))
            except Exception:
                logger.exception("the thread that writes KV blocks failed")
                self._say("it failed in a way that nobody thought of, see the log")

    def _write(self, content: bytes, saved: SavedBlock, stamp_ns: int) -> None:
        try:
            self._store.write(content, saved.read(), stamp_ns)
            if self.trouble:
                self.trouble = ""
                logger.info("KV blocks are written to %s again", self._store.root)
        finally:
            with self._written:
                self._queued -= 1
                self._written.notify_all()

    def _say(self, reason: str) -> None:
        self.resume_at = time.monotonic() + PAUSE_SECONDS
        if reason != self.trouble:
            self.trouble = reason
            logger.warning(
                "KV blocks are not written to %s for now: %s; serving goes on, "
                "and prompts seen from now on are not remembered over a restart",
                self._store.root,
                reason,
            )

    def _touch(self, stamps: Sequences[tuple[bytes, int]]) -> None:
        for content, stamp_ns in stamps:
            self._store.touch(content, stamp_ns)

    def _run_reader(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._run(job)
            except Exception:  # the sequence must not wait for ever
                logger.exception("the thread that reads KV blocks failed")
            self._read.append(job)
            self._has_read.set()

    def _run(self, job: ReadJob) -> None:
        for content in job.hashes:
            data = None if job.cancelled else self._store.read(content)
            if data is None:
                return
            job.found.append((content, data))
