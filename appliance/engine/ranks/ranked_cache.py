"""The KV cache of several devices: each has its heads' part of every block.

A block in host memory or on the disk has one rank's part after another. On its way each rank writes
its part to a window of its own in a file in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.ranks.messages import (
    CopyBlocks,
    CopyStates,
    LoadBlock,
    LoadState,
    SaveBlock,
)
from appliance.engine.run.state_rows import StateRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.engine.moves import SavedBlock, StateCopy, StateLoad
    from appliance.engine.ranks.torch_ranks import TorchRanks
    from appliance.engine.rates import Rates
    from appliance.engine.run.device import Device
    from appliance.kernels.decoder_cache import KVCache

# From one rank's window to the next in the file, which has memory only where it was written.
WINDOW = 1 << 34  # bytes; no block is larger


@dataclass(frozen=True, slots=True)
class RankedCache:
    """The blocks of all ranks; see `Cache`.

    Attributes:
        own: rank 0's.
        ranks: the others.
        sizes: bytes of each rank's part of a block, and of an open block.
    """

    own: KVCache
    ranks: TorchRanks
    sizes: tuple[tuple[int, int], ...]

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self.own.block_size

    @property
    def states(self) -> Tensor:
        """Rank 0's state slots; see `RankedStateRows`."""
        return self.own.states

    @property
    def block_bytes(self) -> int:
        """Bytes of all parts of one block."""
        return sum(block for block, _ in self.sizes)

    @property
    def open_bytes(self) -> int:
        """Bytes of all parts of one open block; 0 if none is sealed."""
        return sum(opened for _, opened in self.sizes)

    def read_block(self, block: int, open_block: int = -1) -> bytes:
        """Return the parts of a block, each with that of its open block if given."""
        self.ranks.order(SaveBlock(block, open_block))
        parts = [self.own.read_block(block, open_block)]
        self.ranks.group.answers()
        sizes = self._parts(open_block)
        file = self.ranks.group.cache
        parts += [read_window(file, rank, sizes[rank]) for rank in range(1, len(sizes))]
        return b"".join(parts)

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        """Write back the bytes that `read_block` returned."""
        sizes, view = self._parts(open_block), memoryview(content)
        assert len(view) == sum(sizes)
        begin = sizes[0]
        for rank in range(1, len(sizes)):
            write_window(self.ranks.group.cache, rank, view[begin : begin + sizes[rank]])
            begin += sizes[rank]
        self.ranks.order(LoadBlock(block, open_block))
        self.own.write_block(block, view[: sizes[0]], open_block)
        self.ranks.group.answers()

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks in all ranks, for copy-on-write."""
        self.ranks.order(CopyBlocks(tuple(sources), tuple(destinations), are_open=False))
        self.own.copy_blocks(sources, destinations)

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy open blocks in all ranks; without sealed layers there are none."""
        if sources:
            self.ranks.order(CopyBlocks(tuple(sources), tuple(destinations), are_open=True))
            self.own.copy_open(sources, destinations)

    def _parts(self, open_block: int) -> list[int]:
        return [block + (opened if open_block >= 0 else 0) for block, opened in self.sizes]


class RankedStateRows(StateRows):
    """Rows of recurrent state, which all ranks have whole and equal: rank 0's are saved."""

    def __init__(self, cache: RankedCache, device: Device, rates: Rates) -> None:
        super().__init__(cache.states, device, rates)
        self._ranks = cache.ranks

    def copy(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            self._ranks.order(CopyStates(tuple((one.source, one.destination) for one in copies)))
        super().copy(copies)

    def load(self, loads: Sequence[StateLoad], saved: Sequence[SavedBlock]) -> None:
        for load in loads:
            write_window(self._ranks.group.cache, 0, load.content(saved).read())
            self._ranks.order(LoadState(load.row))
            self._ranks.group.answers()
        super().load(loads, saved)


def write_window(file: int, rank: int, content: bytes | bytearray | memoryview) -> None:
    """Write to a rank's window."""
    view, done = memoryview(content), 0
    while done < len(view):
        done += os.pwrite(file, view[done:], rank * WINDOW + done)


def read_window(file: int, rank: int, num_bytes: int) -> bytes:
    """Read from a rank's window what has been written to it."""
    found = os.pread(file, num_bytes, rank * WINDOW)
    assert len(found) == num_bytes, (len(found), num_bytes)
    return found
