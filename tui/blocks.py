"""The block map as the dashboard holds it: a 32-bit word per block, never changed in place.

Knows the words of `appliance.events`, nothing of screens or networks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from appliance.events import BlockState

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.events import Delta, Snapshot

_MAX_CELL = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in which state; shared ones are counted as active too."""

    free: int = 0
    cached: int = 0
    active: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Every block of the KV cache at one moment."""

    epoch: int
    block_size: int  # token slots
    cells: NDArray[np.uint32]  # (num_blocks,), read-only, see `events.pack_cell`

    @classmethod
    def of(cls, snapshot: Snapshot) -> Blocks:
        """The map a snapshot describes.

        Raises:
            ValueError: its cells are not what its geometry says.
        """
        cells = np.frombuffer(snapshot.words(), dtype="<u4").astype(np.uint32)
        cells.flags.writeable = False
        return cls(snapshot.epoch, snapshot.block_size, cells)

    def after(self, delta: Delta) -> Blocks:
        """The map once the runs of a delta of the same epoch are written over it.

        Raises:
            ValueError: a run lies outside the map or holds no 32-bit word.
        """
        assert delta.epoch == self.epoch
        cells = self.cells.copy()
        for run in delta.runs:
            end = run.start + run.length
            if not (0 <= run.start <= end <= cells.size and 0 <= run.cell <= _MAX_CELL):
                raise ValueError(f"the delta writes {run} into a map of {cells.size} blocks")
            cells[run.start : end] = run.cell
        cells.flags.writeable = False
        return replace(self, cells=cells)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, whatever they hold."""
        return self.cells.size

    @property
    def states(self) -> NDArray[np.uint32]:
        """A `BlockState` value per block."""
        return self.cells & np.uint32(0xF)

    @property
    def references(self) -> NDArray[np.uint32]:
        """Reference count per block; stays at 255."""
        return self.cells >> np.uint32(8) & np.uint32(0xFF)

    @property
    def owners(self) -> NDArray[np.uint32]:
        """Slot of the owning sequence, or `NO_OWNER`, per block."""
        return self.cells >> np.uint32(16)

    def counts(self) -> BlockCounts:
        """Blocks per state."""
        per_state = np.bincount(self.states, minlength=16)
        shared = np.count_nonzero((self.states == BlockState.ACTIVE) & (self.references > 1))
        return BlockCounts(
            free=int(per_state[BlockState.FREE]),
            cached=int(per_state[BlockState.CACHED]),
            active=int(per_state[BlockState.ACTIVE]),
            shared=int(shared),
        )
