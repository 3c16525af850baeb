"""The dashboard's immutable block map: one 32-bit word per block.

Knows the words of `appliance.events`, nothing of screens or networks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.events import BlockState
from appliance.tui.numbers import counted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.events import Delta, Snapshot

_MAX_CELL = 0xFFFFFFFF
_NOT_HELD = (BlockState.FREE, BlockState.CACHED, BlockState.LOADING)
_HELD = np.array([state not in _NOT_HELD for state in range(16)])


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks in each state; `active` includes shared and written ones."""

    free: int = 0
    cached: int = 0
    active: int = 0
    shared: int = 0
    writing: int = 0
    loading: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Every block of the KV cache at one moment."""

    epoch: int
    block_size: int  # token slots
    cells: NDArray[np.uint32]  # (num_blocks,), read-only, see `events.Snapshot`
    changed: NDArray[np.float32]  # (num_blocks,), read-only: when each last changed hands, seconds

    @classmethod
    def of(cls, snapshot: Snapshot, now: float = 0.0) -> Blocks:
        """Build the map from a snapshot.

        Args:
            snapshot: all blocks; ages start at `now` if it has none.
            now: seconds of the clock that counts ages.

        Raises:
            ValueError: cells or ages do not match the snapshot's geometry.
        """
        cells = np.frombuffer(snapshot.words(), dtype="<u4").astype(np.uint32)
        changed = np.full(cells.size, now, dtype=np.float32)
        if ages := snapshot.age_words():
            changed -= np.frombuffer(ages, dtype="<u2")
        return cls(snapshot.epoch, snapshot.block_size, _frozen(cells), _frozen(changed))

    def after(self, delta: Delta, now: float = 0.0) -> Blocks:
        """Apply the runs of a delta of the same epoch.

        Raises:
            ValueError: a run lies outside the map or holds no 32-bit word.
        """
        assert delta.epoch == self.epoch
        cells, changed = self.cells.copy(), self.changed.copy()
        for run in delta.runs:
            end = run.start + run.length
            if not (0 <= run.start <= end <= cells.size and 0 <= run.cell <= _MAX_CELL):
                of = counted(cells.size, "block")
                raise ValueError(f"the delta writes {run} into a map of {of}")
            cells[run.start : end] = run.cell
            changed[run.start : end] = now
        return replace(self, cells=_frozen(cells), changed=_frozen(changed))

    def aged_like(self, before: Blocks) -> Blocks:
        """Copy the ages of an earlier map for blocks that did not change."""
        same = self.cells == before.cells
        return replace(self, changed=_frozen(np.where(same, before.changed, self.changed)))

    def part(self, span: range) -> Blocks:
        """Return a range of blocks as a map that shares memory with this one."""
        within = slice(span.start, span.stop)
        return replace(self, cells=self.cells[within], changed=self.changed[within])

    @property
    def num_blocks(self) -> int:
        return self.cells.size

    @property
    def states(self) -> NDArray[np.uint32]:
        """`BlockState` value of each block."""
        return self.cells & np.uint32(0xF)

    @property
    def references(self) -> NDArray[np.uint32]:
        """Reference count of each block; saturates at 255."""
        return self.cells >> np.uint32(8) & np.uint32(0xFF)

    @property
    def precisions(self) -> NDArray[np.uint32]:
        """Index into `Info.precisions` of each block."""
        return self.cells >> np.uint32(4) & np.uint32(0xF)

    @property
    def owners(self) -> NDArray[np.uint32]:
        """Slot of each block's owning sequence, or `NO_OWNER`."""
        return self.cells >> np.uint32(16)

    def counts(self) -> BlockCounts:
        per_state = np.bincount(self.states, minlength=16)
        held = _HELD[self.states]
        return BlockCounts(
            free=int(per_state[BlockState.FREE]),
            cached=int(per_state[BlockState.CACHED]),
            active=int(np.count_nonzero(held)),
            shared=int(np.count_nonzero(held & (self.references > 1))),
            writing=int(per_state[BlockState.WRITING]),
            loading=int(per_state[BlockState.LOADING]),
        )


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
