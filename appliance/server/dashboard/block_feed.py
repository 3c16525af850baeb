"""The block map for one watcher: a snapshot, then changes.

A slow watcher gets fewer updates; nothing queues up for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.blocks.block_metadata import STAMPS_PER_SECOND, stamp_of, unpack
from appliance.events import MAX_SHOWN_AGE, NO_OWNER, BlockRun, Delta, Snapshot, TableEntry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.engine.nouns.messages import EngineInfo, Table

HASH_BYTES = 16
MAX_RUNS = 2000  # with more, a snapshot is smaller


class BlockFeed:
    def __init__(self) -> None:
        self._epoch = 0
        self._source: object = None
        self._known: NDArray[np.uint64] | None = None

    def poll(self, metadata: memoryview, info: EngineInfo) -> Snapshot | Delta | None:
        """Return the changes since the last call, or None.

        Args:
            metadata: (num_blocks,) live words; another object means another engine.
        """
        words = np.frombuffer(metadata, dtype=np.uint64).copy()
        known, self._known = self._known, words
        if known is None or metadata.obj is not self._source:
            self._source = metadata.obj
            return self._snapshot(words, info)
        runs = changed_runs(known, words)
        if len(runs) > MAX_RUNS:
            return self._snapshot(words, info)
        return Delta(epoch=self._epoch, runs=runs) if runs else None

    def _snapshot(self, words: NDArray[np.uint64], info: EngineInfo) -> Snapshot:
        self._epoch += 1
        cells = cells_of(words).astype("<u4").tobytes()
        ages = ages_of(words, time.monotonic()).astype("<u2").tobytes()
        return Snapshot.of(self._epoch, info.block_size, cells, ages)


def cells_of(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Convert the engine's words (num_blocks,) to cells (num_blocks,), see `Snapshot.cells`."""
    fields = unpack(words)
    cells: NDArray[np.uint32] = fields.owner.astype(np.uint32)
    cells[cells == 0] = NO_OWNER
    cells <<= 16
    cells |= fields.references.astype(np.uint32) << np.uint32(8)
    cells |= fields.precision.astype(np.uint32) << np.uint32(4)
    cells |= fields.state
    return cells


def ages_of(words: NDArray[np.uint64], now: float) -> NDArray[np.uint16]:
    """Return the seconds since each block changed owner (num_blocks,), at most `MAX_SHOWN_AGE`.

    A block never used has the maximum age.

    Args:
        words: the engine's, (num_blocks,).
        now: monotonic seconds.
    """
    # 32-bit arithmetic wraps around as the stamps do. A new step's stamp may be ahead.
    past = (np.uint32(stamp_of(now)) - unpack(words).stamp).astype(np.int32).clip(min=0)
    seconds = np.minimum(past // STAMPS_PER_SECOND, MAX_SHOWN_AGE)
    return np.where(words == 0, MAX_SHOWN_AGE, seconds).astype(np.uint16)


def table_entries(table: Table, metadata: memoryview) -> tuple[TableEntry, ...]:
    """Describe each block of a block table by the engine's words."""
    blocks = np.array(table.blocks, dtype=np.int64)
    fields = unpack(np.frombuffer(metadata, dtype=np.uint64)[blocks])
    size = len(table.hashes) // HASH_BYTES
    hashes = [table.hashes[HASH_BYTES * n : HASH_BYTES * (n + 1)].hex() for n in range(size)]
    hashes += [""] * (len(blocks) - size)
    columns = (blocks.tolist(), hashes, fields.references.tolist(), fields.precision.tolist())
    return tuple(TableEntry(*entry) for entry in zip(*columns, strict=True))


def changed_runs(before: NDArray[np.uint64], after: NDArray[np.uint64]) -> tuple[BlockRun, ...]:
    """Return the blocks whose words differ, as runs of neighbours with equal new cells.

    Includes a block that returned to its state: its age is 0 again.
    """
    changed = np.flatnonzero(before != after)
    if changed.size == 0:
        return ()
    values = cells_of(after[changed])
    begins = np.concatenate(([True], (np.diff(changed) != 1) | (np.diff(values) != 0)))
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, changed.size))
    columns = (changed[first].tolist(), lengths.tolist(), values[first].tolist())
    return tuple(BlockRun(*run) for run in zip(*columns, strict=True))
