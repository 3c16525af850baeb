"""The KV cache of several devices: each holds its heads' part of every block and state.

A block or state in host memory or on disk holds one rank's part after another. In transit each
rank writes its part to its own window of a file in memory.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.ranks.messages import (
    CopyBlocks,
    CopyStates,
    LoadBlock,
    LoadState,
    SaveBlock,
    SaveState,
)
from appliance.engine.run.moves import StateRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.engine.nouns.moves import Rates, StateCopy, StateLoad
    from appliance.engine.ranks.torch_ranks import TorchRanks
    from appliance.engine.run.device import Device
    from appliance.kernels.cache.decoder_cache import KVCache

# From one rank's window to the next in the file, which has memory only where it was written.
WINDOW = 1 << 34  # bytes; no block is larger


@dataclass(frozen=True, slots=True)
class RankedCache:
    """The blocks of all ranks; see `Cache`.

    Attributes:
        own: rank 0's.
        ranks: the others.
        sizes: bytes of each rank's part of a block, and of an open block.
        state_sizes: bytes of each rank's part of a row of recurrent state.
    """

    own: KVCache
    ranks: TorchRanks
    sizes: tuple[tuple[int, int], ...]
    state_sizes: tuple[int, ...]

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
        """Return a block's parts, each followed by the open block's part if given."""
        self.ranks.order(SaveBlock(block, open_block))
        own = self.own.read_block(block, open_block)
        return own + self._read_others(self._parts(open_block))

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        """Write back the bytes that `read_block` returned."""
        own = self._write_others(content, self._parts(open_block))
        self.ranks.order(LoadBlock(block, open_block))
        self.own.write_block(block, own, open_block)
        self.ranks.group.answers()

    def read_state(self, row: int) -> bytes:
        """Return the parts of a row of recurrent state."""
        self.ranks.order(SaveState(row))
        own = self.states[row].cpu().numpy().tobytes()
        return own + self._read_others(self.state_sizes)

    def write_state(self, row: int, content: bytes | bytearray | memoryview) -> None:
        """Write back the bytes that `read_state` returned."""
        import torch  # which the CPU library does without

        own = self._write_others(content, self.state_sizes)
        self.ranks.order(LoadState(row))
        self.states[row].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
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

    def _read_others(self, sizes: Sequence[int]) -> bytes:
        """Return the parts that the other ranks write to their windows."""
        self.ranks.group.answers()
        file = self.ranks.group.cache
        return b"".join(read_window(file, rank, sizes[rank]) for rank in range(1, len(sizes)))

    def _write_others(
        self, content: bytes | bytearray | memoryview, sizes: Sequence[int]
    ) -> memoryview:
        """Write the other ranks' parts to their windows; return rank 0's."""
        view = memoryview(content)
        assert len(view) == sum(sizes)
        begin = sizes[0]
        for rank in range(1, len(sizes)):
            write_window(self.ranks.group.cache, rank, view[begin : begin + sizes[rank]])
            begin += sizes[rank]
        return view[: sizes[0]]

    def _parts(self, open_block: int) -> list[int]:
        return [block + (opened if open_block >= 0 else 0) for block, opened in self.sizes]


class RankedStateRows(StateRows):
    """Rows of recurrent state; each rank holds its heads' part."""

    def __init__(self, cache: RankedCache, device: Device, rates: Rates) -> None:
        super().__init__(cache.states, device, rates)
        self.state_bytes = sum(cache.state_sizes)
        self._cache = cache

    @property
    def part_bytes(self) -> tuple[int, ...]:
        return self._cache.state_sizes

    def copy(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            pairs = tuple((one.source, one.destination) for one in copies)
            self._cache.ranks.order(CopyStates(pairs))
        super().copy(copies)

    def save(self, rows: Sequence[int]) -> tuple[SavedBlock, ...]:
        saved = []
        for row in rows:
            begin = time.perf_counter()
            saved.append(SavedBlock(self._cache.read_state(row)))
            self._rates.saw_moves(self.state_bytes, time.perf_counter() - begin)
        return tuple(saved)

    def load(self, loads: Sequence[StateLoad], saved: Sequence[SavedBlock]) -> None:
        for load in loads:
            self._cache.write_state(load.row, load.content(saved).read())


def write_window(file: int, rank: int, content: bytes | bytearray | memoryview) -> None:
    view, done = memoryview(content), 0
    while done < len(view):
        done += os.pwrite(file, view[done:], rank * WINDOW + done)


def read_window(file: int, rank: int, num_bytes: int) -> bytes:
    """Read a part from a rank's window."""
    found = os.pread(file, num_bytes, rank * WINDOW)
    assert len(found) == num_bytes, (len(found), num_bytes)
    return found
