"""Which blocks are written to the disk, and when: never in the way of a step. Imports no torch.

Whole prompts with their answers are worth it, since the next turn of a conversation begins with
both; a short one is computed again as fast as it is read. A block waits in the cache, by its hash
alone, until there is a moment for it: all the time there is while nothing runs, and a small share
of it while steps do. One that leaves the cache before is not written.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from appliance.engine.plan import BlockMove, HeldBlock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.tiers.disk_tier import DiskTier

MIN_TOKENS = 256  # of a chain that is written
BUSY_SHARE = 0.02  # of the time of steps that copying and writing may take
MAX_BLOCKS_PER_STEP = 2
MAX_PENDING = 1 << 16  # blocks
_MAX_SAVED_SECONDS = 0.05  # of its share that was not used
_IDLE_BLOCKS = 8  # in a short piece of idle work
_IDLE_SECONDS = 0.005


class WriteBehind:
    """The blocks that are still to be written.

    Args:
        blocks: the cache's books.
        disk: where they go.
        save: takes content out of the cache.
        clock: seconds, to see how long that takes.

    Attributes:
        num_dropped: blocks that were to be written and left the cache before.
    """

    def __init__(
        self,
        blocks: BlockManager,
        disk: DiskTier,
        save: Callable[[Sequence[BlockMove]], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_dropped = 0
        self._blocks = blocks
        self._disk = disk
        self._save = save
        self._clock = clock
        self._pending: dict[bytes, int] = {}  # time of last use, by hash
        self._allowance = 0.0  # seconds
        self._copy_seconds = 0.0  # of the last block

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_work(self) -> bool:
        """Whether an idle moment can be used."""
        return bool(self._pending) and self._disk.is_writing

    def offer(self, hashes: list[bytes]) -> None:
        """Have a chain's blocks written, or only its time noted where they are already."""
        if len(hashes) * self._blocks.block_size < MIN_TOKENS:
            return
        now = time.time_ns()
        known = []
        for depth, content in enumerate(hashes):
            # A tail is older than its head, so that the head is removed last.
            stamp = now - 1000 * depth
            if content in self._disk:
                known.append((content, stamp))
            else:
                self._pending[content] = stamp
        self._disk.touch(known)
        for content in list(self._pending)[: max(0, len(self._pending) - MAX_PENDING)]:
            self.lost(content)

    def lost(self, content: bytes) -> None:
        """A block leaves the cache."""
        if self._pending.pop(content, None) is not None:
            self.num_dropped += 1

    def after_step(self, seconds: float) -> None:
        """Use a step's share of the time, which is little."""
        if not self.has_work:
            return
        self._allowance = min(self._allowance + BUSY_SHARE * seconds, _MAX_SAVED_SECONDS)
        for _ in range(MAX_BLOCKS_PER_STEP):
            if self._allowance <= 0 or not self._disk.has_room or not self._pending:
                return
            self._write_next()
            self._allowance -= self._copy_seconds + self._disk.block_seconds

    def idle(self) -> None:
        """Write some blocks, or wait a moment until there is room for them."""
        for _ in range(_IDLE_BLOCKS):
            if not self.has_work or not self._disk.wait_for_room(_IDLE_SECONDS):
                return
            self._write_next()

    def flush(self, seconds: float) -> None:
        """Write all that there is time for."""
        end = time.monotonic() + seconds
        while self.has_work and self._disk.wait_for_room(end - time.monotonic()):
            self._write_next()
        self._disk.wait_for_room(end - time.monotonic(), for_all=True)

    def _write_next(self) -> None:
        content = next(iter(self._pending))
        stamp = self._pending.pop(content)
        block = self._blocks.index.get(content)
        if block is None or content in self._disk:
            self.num_dropped += block is None
            return
        begin = self._clock()
        held = HeldBlock()
        self._save([BlockMove(block, held)])
        self._copy_seconds = self._clock() - begin
        self._disk.write(content, held, stamp)
