"""Copies blocks and recurrent states: within the cache, to host memory and back.

Copies a cache in host memory synchronously. On a GPU a kernel gathers blocks, which are copied
concurrently with steps.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.run.pinned_memory import PinnedRows
from appliance.kernels import arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.engine.nouns.moves import (
        BlockCopy,
        BlockLoad,
        BlockSave,
        Rates,
        StateCopy,
        StateLoad,
    )
    from appliance.engine.run.device import Copy, Device
    from appliance.engine.run.pinned_memory import PinnedMemory
    from appliance.kernels.block_copy.launch import BlockMover
    from appliance.model.executor import Cache
    from appliance.model.fallback.own_cache import OwnCaches


Move = TypeVar("Move", "BlockSave", "BlockLoad")
BUFFER_BYTES = 16 << 20  # less than a millisecond of a PCIe link; grows for a larger block
NUM_BUFFERS = 2  # one is copied while the other is gathered or scattered


class BlockMoves(Protocol):
    """Moves blocks between one cache and host memory, in call order.

    Attributes:
        block_bytes: of one block in all layers.
        open_bytes: of one open block in all layers; 0 without sealed layers.
    """

    block_bytes: int
    open_bytes: int

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, with their open blocks, within the cache."""
        ...

    def save(self, saves: Sequence[BlockSave]) -> tuple[SavedBlock, ...]:
        """Copy content out of the cache, in the order of `saves`."""
        ...

    def load(self, loads: Sequence[BlockLoad], saved: Sequence[SavedBlock] = ()) -> None:
        """Fill blocks of the cache; `saved` is the result of the same plan's `save`."""
        ...


class HostMoves:
    def __init__(self, cache: Cache, rates: Rates) -> None:
        self.block_bytes = cache.block_bytes
        self.open_bytes = cache.open_bytes
        self._cache = cache
        self._rates = rates

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        self._cache.copy_blocks(
            [copy.source for copy in copies], [copy.destination for copy in copies]
        )
        opened = [copy for copy in copies if copy.open_source >= 0]
        self._cache.copy_open(
            [copy.open_source for copy in opened], [copy.open_destination for copy in opened]
        )

    def save(self, saves: Sequence[BlockSave]) -> tuple[SavedBlock, ...]:
        begin = time.perf_counter()
        contents = [self._cache.read_block(save.block, save.open_block) for save in saves]
        self._rates.saw_moves(sum(map(len, contents)), time.perf_counter() - begin)
        return tuple(map(SavedBlock, contents))

    def load(self, loads: Sequence[BlockLoad], saved: Sequence[SavedBlock] = ()) -> None:
        begin, num_bytes = time.perf_counter(), 0
        for load in loads:
            content = load.content(saved).read()
            self._cache.write_block(load.block, content, load.open_block)
            num_bytes += len(content)
        self._rates.saw_moves(num_bytes, time.perf_counter() - begin)


class DeviceMoves:
    """Moves blocks of a cache on an asynchronous device.

    The kernel that gathers or scatters blocks runs among the steps; the copy between device and
    pinned host memory runs concurrently. Buffers alternate, so any number of blocks moves through
    the same memory.

    Args:
        pinned: for what leaves the cache.
        open_mover: moves open blocks, with sealed layers.
    """

    def __init__(
        self,
        mover: BlockMover,
        device: Device,
        rates: Rates,
        pinned: PinnedMemory,
        open_mover: BlockMover | None = None,
    ) -> None:
        self.block_bytes = mover.block_bytes
        self.open_bytes = 0 if open_mover is None else open_mover.block_bytes
        self._mover = mover
        self._open_mover = open_mover
        self._device = device
        self._rates = rates
        size = _buffer_bytes(self.block_bytes + self.open_bytes)
        self.buffers = deque(_Buffer(device.zeros((size,), "uint8")) for _ in range(NUM_BUFFERS))
        self._rows = {
            num_bytes: PinnedRows(pinned, num_bytes)
            for num_bytes in (self.block_bytes, self.block_bytes + self.open_bytes)
        }
        # Load the kernel now instead of during a step.
        mover.swap_out([0], self.buffers[0].memory[: self.block_bytes].view(1, -1))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        self._mover.copy([copy.source for copy in copies], [copy.destination for copy in copies])
        if self._open_mover is not None:
            opened = [copy for copy in copies if copy.open_source >= 0]
            self._open_mover.copy(
                [copy.open_source for copy in opened], [copy.open_destination for copy in opened]
            )

    def save(self, saves: Sequence[BlockSave]) -> tuple[SavedBlock, ...]:
        """See `BlockMoves`; the content is complete once `SavedBlock.over` has ended."""
        saved: dict[BlockSave, SavedBlock] = {}
        for group in self._groups(saves):
            buffer, staging = self._next_buffer(group)
            blocks, opened = self._parts(staging, group)
            self._mover.swap_out([save.block for save in group], blocks)
            if self._open_mover is not None and opened is not None:
                self._open_mover.swap_out([group[0].open_block], opened)
            rows, contents = zip(*(self._rows[staging.shape[1]].take() for _ in group), strict=True)
            copy = self._device.fetch_aside(staging, rows)
            buffer.over = _Noted(copy, staging.numel(), self._rates)
            for save, content in zip(group, contents, strict=True):
                saved[save] = SavedBlock(content, buffer.over)
        return tuple(saved[save] for save in saves)

    def load(self, loads: Sequence[BlockLoad], saved: Sequence[SavedBlock] = ()) -> None:
        """See `BlockMoves`; the blocks are filled for steps enqueued later."""
        for group in self._groups(loads):
            buffer, staging = self._next_buffer(group)
            # Copies run in order, so content still on its way to the host arrives first, and rows
            # may be released before they have been read.
            contents = [_as_tensor(load.content(saved).content) for load in group]
            copy = self._device.send_aside(contents, staging)
            buffer.over = _Noted(copy, staging.numel(), self._rates)
            blocks, opened = self._parts(staging, group)
            self._mover.swap_in(blocks, [load.block for load in group])
            if self._open_mover is not None and opened is not None:
                self._open_mover.swap_in(opened, [group[0].open_block])

    def _groups(self, moves: Sequence[Move]) -> list[list[Move]]:
        """Group whole blocks by buffer size; one with an open block is its own group."""
        whole = [move for move in moves if move.open_block < 0]
        most = len(self.buffers[0].memory) // self.block_bytes
        groups = [whole[start : start + most] for start in range(0, len(whole), most)]
        groups += [[move] for move in moves if move.open_block >= 0]
        return groups

    def _next_buffer(self, group: Sequence[BlockSave | BlockLoad]) -> tuple[_Buffer, Tensor]:
        """Return the next buffer, and a row in it per move: (len(group), num_bytes)."""
        self.buffers.rotate()
        buffer = self.buffers[0]
        if buffer.over is not None:
            buffer.over.note_if_over()
            self._device.follow(buffer.over.copy)
        size = self.block_bytes + (self.open_bytes if group[0].open_block >= 0 else 0)
        return buffer, buffer.memory[: len(group) * size].view(len(group), size)

    def _parts(
        self, staging: Tensor, group: Sequence[BlockSave | BlockLoad]
    ) -> tuple[Tensor, Tensor | None]:
        """Split a buffer into blocks and, if its only move has one, the open block."""
        if group[0].open_block < 0:
            return staging, None
        size = self.block_bytes
        return staging[0, :size].view(1, size), staging[0, size:].view(1, self.open_bytes)


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # (num_bytes,) uint8
    over: _Noted | None = None  # its last copy


class _Noted:
    """A copy that records its duration once, when first seen complete."""

    def __init__(self, copy: Copy, num_bytes: int, rates: Rates) -> None:
        self.copy = copy
        self._num_bytes = num_bytes
        self._rates = rates

    def note_if_over(self) -> None:
        if self.copy.is_over:
            self.wait()

    def wait(self) -> None:
        seconds = self.copy.wait()
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._rates.saw_moves(num_bytes, seconds)


def _as_tensor(content: bytes | bytearray | memoryview) -> Tensor:
    array = np.frombuffer(_writable(content), dtype=np.uint8)
    return arrays.of_numpy(array).tensor()  # type: ignore[no-any-return]


def _buffer_bytes(largest: int) -> int:
    return largest * max(1, BUFFER_BYTES // largest)


def staging_bytes(block_bytes: int, open_bytes: int = 0) -> int:
    """Return the device memory that `DeviceMoves` needs for blocks of these sizes."""
    return NUM_BUFFERS * _buffer_bytes(block_bytes + open_bytes)


class StateRows:
    """The rows of recurrent state on one device; moves run in call order.

    Args:
        rows: (num_rows, state_bytes) uint8, which steps read and write.
        pinned: for what is saved from an asynchronous device.
    """

    def __init__(
        self, rows: Tensor, device: Device, rates: Rates, pinned: PinnedMemory | None = None
    ) -> None:
        self.state_bytes = rows.shape[1]
        self._rows = device.view(rows)
        self._device = device
        self._rates = rates
        self._pinned = None if pinned is None else PinnedRows(pinned, self.state_bytes)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a saved row."""
        return (self.state_bytes,)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        for source, destination in copies:
            self._rows[destination].copy_(self._rows[source])

    def forget(self, rows: Sequence[int]) -> None:
        """Do nothing for rows that sequences left: their memory is there for the next ones."""

    def save(self, rows: Sequence[int]) -> tuple[SavedBlock, ...]:
        """Copy rows to host memory; on an asynchronous device later work waits for it."""
        return tuple(map(self._save, rows))

    def load(self, loads: Sequence[StateLoad], saved: Sequence[SavedBlock]) -> None:
        """Fill rows; `saved` is the result of the same plan's `save`."""
        for load in loads:
            content = load.content(saved)
            if not self._device.is_asynchronous:
                content.read()
            source = self._device.view(np.frombuffer(_writable(content.content), dtype=np.uint8))
            self._device.send_aside([source], self._rows[load.row : load.row + 1])

    def _save(self, row: int) -> SavedBlock:
        if not self._device.is_asynchronous:
            begin = time.perf_counter()
            content = self._rows[row].numpy().tobytes()
            self._rates.saw_moves(len(content), time.perf_counter() - begin)
            return SavedBlock(content)
        assert self._pinned is not None
        place, view = self._pinned.take()
        copy = self._device.fetch_aside(self._rows[row : row + 1], [place])
        self._device.follow(copy)  # a step may write to the row
        return SavedBlock(view, copy)


class OwnCacheRows:
    """Caches of transformers' classes in the place of rows: moves run in call order.

    Args:
        cache: whose slots hold them.
        state_bytes: of a cache without tokens.
    """

    def __init__(self, cache: OwnCaches, state_bytes: int) -> None:
        self.state_bytes = state_bytes
        self._cache = cache

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a saved row."""
        return (self.state_bytes,)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        for source, destination in copies:
            self._cache.copy_state(source, destination)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop what sequences held that have ended."""
        for row in rows:
            self._cache.drop_state(row)

    def save(self, rows: Sequence[int]) -> tuple[SavedBlock, ...]:
        """Save nothing: no tier keeps them."""
        assert not rows, "caches of transformers' classes are not kept"
        return ()

    def load(self, loads: Sequence[StateLoad], saved: Sequence[SavedBlock]) -> None:
        """Load nothing: no tier has kept any."""
        assert not loads, "caches of transformers' classes are not kept"


def _writable(content: bytes | bytearray | memoryview) -> bytearray | memoryview:
    """Return the same bytes in memory that torch accepts."""
    return bytearray(content) if isinstance(content, bytes) else content
