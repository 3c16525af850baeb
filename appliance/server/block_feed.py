"""The block map for one watcher: a snapshot, then what changed since the watcher was last told.

A watcher that reads slowly is told less often, never from a queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.block_metadata import unpack
from appliance.events import NO_OWNER, Delta, Run, Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.engine.messages import EngineInfo

MAX_RUNS = 2000  # beyond this a snapshot is smaller


class BlockFeed:
    """What one watcher knows."""

    def __init__(self) -> None:
        self._epoch = 0
        self._source: object = None
        self._known: NDArray[np.uint32] | None = None

    def poll(self, metadata: memoryview, info: EngineInfo) -> Snapshot | Delta | None:
        """What to tell the watcher now; None if nothing changed.

        Args:
            metadata: (num_blocks,) live words of the engine; another object means another engine.
            info: of that engine.
        """
        cells = cells_of(np.frombuffer(metadata, dtype=np.uint64))
        known, self._known = self._known, cells
        if known is None or metadata.obj is not self._source:
            self._source = metadata.obj
            return self._snapshot(cells, info)
        runs = changed_runs(known, cells)
        if len(runs) > MAX_RUNS:
            return self._snapshot(cells, info)
        return Delta(epoch=self._epoch, runs=runs) if runs else None

    def _snapshot(self, cells: NDArray[np.uint32], info: EngineInfo) -> Snapshot:
        self._epoch += 1
        return Snapshot.of(self._epoch, info.block_size, cells.astype("<u4").tobytes())


def cells_of(words: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Words of the engine (num_blocks,) as cells of the feed (num_blocks,), see `pack_cell`.

    All blocks have the one format of the engine's cache, so the precision index is 0.
    """
    fields = unpack(words)
    owner = np.where(fields.owner == 0, NO_OWNER, fields.owner).astype(np.uint32)
    references = fields.references.astype(np.uint32)
    return (owner << np.uint32(16)) | (references << np.uint32(8)) | fields.state


def changed_runs(before: NDArray[np.uint32], after: NDArray[np.uint32]) -> tuple[Run, ...]:
    """The blocks that differ, as runs of neighbours with equal new cells."""
    changed = np.flatnonzero(before != after)
    if changed.size == 0:
        return ()
    values = after[changed]
    begins = np.concatenate(([True], (np.diff(changed) != 1) | (np.diff(values) != 0)))
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, changed.size))
    columns = (changed[first].tolist(), lengths.tolist(), values[first].tolist())
    return tuple(Run(*run) for run in zip(*columns, strict=True))
