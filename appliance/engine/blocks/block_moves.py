"""Takes blocks out of the KV cache into host memory and puts them back.

A cache in host memory is copied at once. That of a GPU is gathered by a kernel and copied by the
device itself, beside the steps that it computes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.engine.device.device import Copy, Device
    from appliance.engine.plan import BlockMove, HeldBlock
    from appliance.engine.rates import Rates
    from appliance.kernels.block_copy.launch import BlockMover
    from appliance.model.executor import Cache


MAX_LOADS_IN_USE = 2


class BlockMoves(Protocol):
    """Moves blocks between one cache and host memory, in the order in which it is asked to.

    Attributes:
        block_bytes: of one block of all layers.
        open_bytes: of one open page of all layers; 0 if none is sealed.
    """

    block_bytes: int
    open_bytes: int

    def save(self, moves: Sequence[BlockMove]) -> None:
        """Fill what is held from the cache."""
        ...

    def load(self, moves: Sequence[BlockMove]) -> None:
        """Fill blocks of the cache from what is held."""
        ...


class HostMoves:
    """For a cache in host memory.

    Args:
        cache: it.
        rates: where the time that it takes is noted.
    """

    def __init__(self, cache: Cache, rates: Rates) -> None:
        self.block_bytes = cache.block_bytes
        self.open_bytes = cache.open_bytes
        self._cache = cache
        self._rates = rates

    def save(self, moves: Sequence[BlockMove]) -> None:
        """See `BlockMoves`."""
        begin, num_bytes = time.perf_counter(), 0
        for move in moves:
            move.held.content = self._cache.read_block(move.block, move.open_page)
            num_bytes += len(move.held.content)
        self._rates.saw_moves(num_bytes, time.perf_counter() - begin)

    def load(self, moves: Sequence[BlockMove]) -> None:
        """See `BlockMoves`."""
        begin, num_bytes = time.perf_counter(), 0
        for move in moves:
            content = move.held.read()
            self._cache.write_block(move.block, content, move.open_page)
            num_bytes += len(content)
        self._rates.saw_moves(num_bytes, time.perf_counter() - begin)


class DeviceMoves:
    """For a cache on a device that works by itself.

    The kernel that gathers or scatters blocks takes its place among the steps; the copy between
    device and pinned host memory goes on beside them.

    Args:
        mover: of the blocks.
        device: where they are.
        rates: where the time that it takes is noted.
        open_mover: of the open pages, where layers are sealed.
    """

    def __init__(
        self,
        mover: BlockMover,
        device: Device,
        rates: Rates,
        open_mover: BlockMover | None = None,
    ) -> None:
        self.block_bytes = mover.block_bytes
        self.open_bytes = 0 if open_mover is None else open_mover.block_bytes
        self._mover = mover
        self._open_mover = open_mover
        self._device = device
        self._rates = rates
        self._in_use: deque[tuple[Copy, list[HeldBlock]]] = deque()

    def save(self, moves: Sequence[BlockMove]) -> None:
        """See `BlockMoves`; the content is there once `HeldBlock.over` is."""
        for group in _batches(moves):
            staging = self._staging(group)
            blocks, opened = self._parts(staging, group)
            self._mover.swap_out([move.block for move in group], blocks)
            if self._open_mover is not None and opened is not None:
                self._open_mover.swap_out([group[0].open_page], opened)
            host = self._device.pinned(staging.numel()).view(staging.shape)
            copy = self._device.fetch_aside(staging, host)
            over = _Noted(copy, host.numel(), self._rates)
            for move, row in zip(group, host, strict=True):
                move.held.content, move.held.over = memoryview(row.numpy()), over

    def load(self, moves: Sequence[BlockMove]) -> None:
        """See `BlockMoves`; steps that are enqueued later find the blocks filled."""
        for group in _batches(moves):
            staging = self._staging(group)
            held = [move.held for move in group]
            copy = self._device.send_aside([_as_tensor(one.content) for one in held], staging)
            blocks, opened = self._parts(staging, group)
            self._mover.swap_in(blocks, [move.block for move in group])
            if self._open_mover is not None and opened is not None:
                self._open_mover.swap_in(opened, [group[0].open_page])
            # The device reads host memory by itself, so it must last until that is over.
            self._in_use.append((copy, held))
            while len(self._in_use) > MAX_LOADS_IN_USE:
                self._in_use.popleft()[0].wait()

    def _staging(self, group: Sequence[BlockMove]) -> Tensor:
        """A row for each move, (len(group), num_bytes) uint8 on the device."""
        size = self.block_bytes + (self.open_bytes if group[0].open_page >= 0 else 0)
        shape = (len(group), size)
        return torch.empty(shape, dtype=torch.uint8, device=self._device.torch_device)

    def _parts(self, staging: Tensor, group: Sequence[BlockMove]) -> tuple[Tensor, Tensor | None]:
        """The part of blocks, and that of the open page of the only one, if it has one."""
        if group[0].open_page < 0:
            return staging, None
        size = self.block_bytes
        return staging[0, :size].view(1, size), staging[0, size:].view(1, self.open_bytes)


def _batches(moves: Sequence[BlockMove]) -> list[list[BlockMove]]:
    """Moves of whole blocks together, each with an open page by itself."""
    whole = [move for move in moves if move.open_page < 0]
    return [*([whole] if whole else []), *([move] for move in moves if move.open_page >= 0)]


class _Noted:
    """A copy; whoever waits for it first notes how long it took."""

    def __init__(self, copy: Copy, num_bytes: int, rates: Rates) -> None:
        self._copy: Copy | None = copy
        self._num_bytes = num_bytes
        self._rates = rates

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            self._rates.saw_moves(self._num_bytes, copy.wait())


def _as_tensor(content: bytes | bytearray | memoryview | None) -> Tensor:
    """The same bytes, (num_bytes,) uint8."""
    assert content is not None
    if isinstance(content, bytes):
        content = bytearray(content)  # torch wants to be able to write there
    return torch.frombuffer(content, dtype=torch.uint8)
