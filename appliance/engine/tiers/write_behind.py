"""Writes blocks and state checkpoints to disk without delaying steps. Imports no torch.

A block waits in the cache, by hash alone, until there is time: all of it while nothing runs, and a
small share of it during steps. A block that leaves the cache first is not written.

If all cores compute a step, each processor second of writing delays the step by one. So the share
covers all of it: the step thread's time for handing a block over, and the disk thread's processor
time. A debt is paid before the next block is handed over, one at a time. An unused share expires:
otherwise answers would pay for the share that a long prompt left.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_hashes import block_of, is_state
from appliance.engine.nouns.moves import BlockSave

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import SavedBlock
    from appliance.engine.tiers.disk_tier import DiskTier


MIN_TOKENS = 256  # recomputing fewer is about as fast as reading them

# README.md, the banner and `appliance serve --help` use these words; test_disk_rule.py checks it.
ON_DISK = (
    "only the beginning that a prompt shares with an earlier prompt and its answer, where that is "
    f"{MIN_TOKENS} tokens or longer"
)


BUSY_SHARE = 0.02  # of steps' time, for handing over and writing
MAX_PENDING = 1 << 16  # blocks
_IDLE_BLOCKS = 8  # per short piece of idle work
_IDLE_SECONDS = 0.005


class WriteBehind:
    """The blocks still to write.

    Args:
        save: copies blocks out of the cache.
        clock: seconds that measure steps and handing over. If processors compute steps, the calling
            thread's processor time: beside other processes a step takes longer, but can spare no
            more.
        save_states: copies rows of recurrent state out of the cache; None without recurrent layers.

    Attributes:
        num_dropped: blocks that left the cache before they were written.
    """

    def __init__(
        self,
        blocks: BlockManager,
        disk: DiskTier,
        save: Callable[[Sequence[BlockSave]], tuple[SavedBlock, ...]],
        clock: Callable[[], float],
        save_states: Callable[[Sequence[int]], tuple[SavedBlock, ...]] | None = None,
    ) -> None:
        self.num_dropped = 0
        self._blocks = blocks
        self._disk = disk
        self._save = save
        self._save_states = save_states
        self._clock = clock
        self._pending: dict[bytes, int] = {}  # time of last use by hash
        self._owed = 0.0  # seconds taken from steps beyond the share
        self._seen = disk.cpu_seconds  # of the disk's thread, already counted
        self._last = clock()  # end of the last step or idle moment

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_work(self) -> bool:
        """True if it has work for an idle moment."""
        return bool(self._pending) and self._disk.is_writing

    def offer(self, hashes: list[bytes]) -> None:
        """Queue a chain's blocks for writing; only update the time of those already on disk."""
        begin, now = self._clock(), time.time_ns()
        known = []
        for depth, content in enumerate(hashes):
            # A tail counts as older than its head, so the head is removed last.
            stamp = now - 1000 * depth
            if content in self._disk:
                known.append((content, stamp))
            else:
                self._pending[content] = stamp
        self._disk.touch(known)
        for content in list(islice(self._pending, max(0, len(self._pending) - MAX_PENDING))):
            self.lost(content)
        self._owed += self._clock() - begin

    def lost(self, content: bytes) -> None:
        """Drop a block that leaves the cache."""
        if self._pending.pop(content, None) is not None:
            self.num_dropped += 1

    def after_step(self) -> None:
        """Pay the debt from a step's share; hand over one block if that settles it."""
        now, spent = self._clock(), self._disk.cpu_seconds
        taken, given = spent - self._seen, BUSY_SHARE * max(0.0, now - self._last)
        self._owed = max(0.0, self._owed + taken - given)
        self._last, self._seen = now, spent
        if not self._owed and self.has_work and self._disk.is_done:
            self._write_next()
            self._owed = self._clock() - now

    def idle(self) -> None:
        """Write some blocks, or wait briefly for room."""
        for _ in range(_IDLE_BLOCKS):
            if not self.has_work or not self._disk.wait_for_room(_IDLE_SECONDS):
                break
            self._write_next()
        # Writing so far delayed no step.
        self._last, self._seen = self._clock(), self._disk.cpu_seconds

    def flush(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.has_work and self._disk.wait_for_room(end - time.monotonic()):
            self._write_next()
        self._disk.wait_for_room(end - time.monotonic(), for_all=True)

    def _write_next(self) -> None:
        content = next(iter(self._pending))
        stamp = self._pending.pop(content)
        saved = None if content in self._disk else self._read(content)
        if saved is not None:
            self._disk.write(content, saved, stamp)

    def _read(self, content: bytes) -> SavedBlock | None:
        """Copy a block or checkpoint out of the cache; count it if it is gone."""
        if is_state(content):
            assert self._blocks.states is not None
            assert self._save_states is not None
            checkpoint = self._blocks.states.checkpoints.get(block_of(content))
            if checkpoint is not None:
                return self._save_states([checkpoint.row])[0]
        else:
            block = self._blocks.index.get(content)
            if block is not None:
                return self._save([BlockSave(block)])[0]
        self.num_dropped += 1
        return None


def num_on_disk(num_shared_tokens: int, block_size: int) -> int:
    """Return the number of a sequence's leading blocks that may be written.

    Finished conversations, one-time questions and load tests repeat nothing, so they leave nothing.

    Args:
        num_shared_tokens: of its prompt, found in the cache, in host memory or on disk.
        block_size: token slots per block; writes only whole blocks.
    """
    num_blocks = num_shared_tokens // block_size
    return num_blocks if num_blocks * block_size >= MIN_TOKENS else 0
