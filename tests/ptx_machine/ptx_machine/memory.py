"""Global and shared memory, as a program sees them: what is wrong on a GPU is an error here.

Global memory is that of this process, but only allocations that were handed to the kernel may be
touched, at multiples of what is moved at once. In shared memory, what one warp wrote another may
touch only after a barrier, and asynchronous copies land as late as they may.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptx_machine.numbers import Bits

Lanes = NDArray[np.intp]  # numbers of threads
Mask = NDArray[np.bool_]
SECTOR = 32  # bytes that global memory moves at least
WARP = 32
BANKS = 32
POISON = 0xFF  # a NaN in every format
_ADDED = 0xFF  # the writer of what any warp has added to


class MemoryAccessError(Exception):
    """An access that a GPU would refuse, or answer with anything."""


class GlobalMemory:
    """Allocations of this process.

    Args:
        tensors: that a kernel was given.
        traffic: counts of accesses, added to; None to count none, which takes time.
    """

    def __init__(self, tensors: Iterable[Tensor], traffic: Counter[str] | None) -> None:
        self._traffic = traffic
        self._know(tensors)

    def _know(self, tensors: Iterable[Tensor]) -> None:
        storages = [
            tensor.untyped_storage()
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.layout is torch.strided
        ]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
        self._bases = np.array(sorted(sizes), dtype=np.uint64)
        self._ends = np.array([base + sizes[base] for base in sorted(sizes)], dtype=np.uint64)
        self._views = [
            np.ctypeslib.as_array((ctypes.c_uint8 * sizes[base]).from_address(base))
            for base in sorted(sizes)
        ]

    def load(self, address: Bits, lanes: Lanes, width: int, count: int) -> list[Bits]:
        """Count numbers of width bytes for each thread."""
        address = address[lanes]
        self._count("load", address, lanes, width * count)
        results = [np.zeros(len(lanes), f"u{width}") for _ in range(count)]
        for chosen, view, place in self._places(address, width, count):
            for i, result in enumerate(results):
                result[chosen] = view[place + i]
        return results

    def store(self, address: Bits, lanes: Lanes, values: list[Bits]) -> None:
        """The inverse of `load`."""
        address, width = address[lanes], values[0].dtype.itemsize
        self._count("store", address, lanes, width * len(values))
        for chosen, view, place in self._places(address, width, len(values)):
            for i, value in enumerate(values):
                view[place + i] = value[chosen]

    def add(self, address: Bits, lanes: Lanes, values: Bits) -> Bits:
        """Add to numbers, a thread after the other; returns what each found there."""
        found = np.zeros_like(values)
        self._count("add", address[lanes], lanes, values.dtype.itemsize)
        for chosen, view, place in self._places(address[lanes], values.dtype.itemsize, 1):
            found[chosen] = _add(view, place, values[chosen])
        return found

    def _places(
        self, address: Bits, width: int, count: int
    ) -> list[tuple[slice | NDArray[np.bool_], Bits, NDArray[np.intp]]]:
        """By allocation: which threads touch it, its numbers, and the first one's index."""
        size = width * count
        if not len(address):
            return []
        if (address % np.uint64(size)).any():
            wrong = int(address[address % np.uint64(size) != 0][0])
            raise MemoryAccessError(f"{size} bytes at {wrong:#x}, which is no multiple of that")
        owner, inside = self._owners(address, size)
        if not inside.all():  # a table of addresses may point to any other tensor
            self._know(one for one in gc.get_objects() if type(one) is Tensor)
            owner, inside = self._owners(address, size)
        if not inside.all():
            wrong, near = int(address[~inside][0]), int(owner[~inside][0])
            base, end = int(self._bases[near]), int(self._ends[near])
            what = f"{size} bytes at {wrong:#x}, nearest [{base:#x}, {end:#x})"
            raise MemoryAccessError(f"outside of all tensors: {what}")
        places: list[tuple[slice | NDArray[np.bool_], Bits, NDArray[np.intp]]] = []
        owners = np.unique(owner)
        for one in owners:
            chosen = slice(None) if len(owners) == 1 else owner == one
            view = self._views[one]
            numbers = view[: len(view) // width * width].view(f"u{width}")
            place = ((address[chosen] - self._bases[one]) // np.uint64(width)).astype(np.intp)
            places.append((chosen, numbers, place))
        return places

    def _owners(self, address: Bits, size: int) -> tuple[NDArray[np.intp], Mask]:
        owner = np.searchsorted(self._bases, address, side="right") - 1
        inside = owner >= 0
        return owner, inside & (address <= self._ends[owner] - np.uint64(size))

    def _count(self, what: str, address: Bits, lanes: Lanes, size: int) -> None:
        """Sectors that the warps ask for, and the bytes that they wanted."""
        if size > SECTOR:
            raise NotImplementedError("an access of more than a sector")
        if self._traffic is None:
            return
        sectors = (lanes // WARP).astype(np.uint64) << np.uint64(48) | address // np.uint64(SECTOR)
        touched = np.unique(sectors)
        self._traffic[f"global {what} sectors"] += len(touched)
        self._traffic[f"global {what} bytes"] += size * len(lanes)


def _add(numbers: Bits, place: NDArray[np.intp], values: Bits) -> Bits:
    """Add values to numbers[place], in order; returns each number before."""
    if not len(place):
        return values
    order = np.argsort(place, kind="stable")
    at, sums = place[order], np.cumsum(values[order], dtype=values.dtype)
    begins = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
    before = sums - values[order]  # of all places; what came before its own place is taken off
    own = np.repeat(before[begins], np.diff(np.append(begins, len(at))))
    found = np.empty_like(values)
    found[order] = numbers[at] + (before - own)
    np.add.at(numbers, place, values)
    return found


@dataclass(slots=True)
class _Copy:
    """An asynchronous copy into shared memory, on its way."""

    lanes: Lanes
    group: NDArray[np.int64]  # of each thread, by number
    place: NDArray[np.intp]  # of each thread's first byte
    data: NDArray[np.uint8]  # (threads, bytes)


@dataclass(slots=True)
class SharedMemory:
    """Of several programs of the same size, side by side.

    Attributes:
        size: bytes of one program.
        threads: of one program.
        programs: how many.
        traffic: counts of accesses, added to; None to count none, which takes time.
    """

    size: int
    threads: int
    programs: int
    traffic: Counter[str] | None
    data: NDArray[np.uint8] = field(init=False)
    _stride: int = field(init=False)  # from a program to the next
    _writer: NDArray[np.uint8] = field(init=False)  # warp + 1 that wrote a byte since a barrier
    _readers: NDArray[np.uint16] = field(init=False)  # a bit for each warp
    _open: list[_Copy] = field(init=False, default_factory=list)
    _groups: NDArray[np.int64] = field(init=False)  # that each thread has closed

    def __post_init__(self) -> None:
        self._stride = max(16, -(-self.size // 16) * 16)
        self.data = np.full(self.programs * self._stride, POISON, np.uint8)
        self._writer = np.zeros(self.programs * self._stride, np.uint8)
        self._readers = np.zeros(self.programs * self._stride, np.uint16)
        self._groups = np.zeros(self.programs * self.threads, np.int64)

    def load(self, address: Bits, lanes: Lanes, width: int, count: int) -> list[Bits]:
        """Count numbers of width bytes for each thread."""
        first = self._first(address, lanes, width * count)
        self._note_read(first, lanes, width * count)
        numbers = self.data.view(f"u{width}")
        return [numbers[first // width + i] for i in range(count)]

    def store(self, address: Bits, lanes: Lanes, values: list[Bits]) -> None:
        """The inverse of `load`."""
        width = values[0].dtype.itemsize
        first = self._first(address, lanes, width * len(values))
        self._note_write(first, lanes, width * len(values))
        numbers = self.data.view(f"u{width}")
        for i, value in enumerate(values):
            numbers[first // width + i] = value
            if (numbers[first // width + i] != value).any():
                self._race("stored different numbers at one place", first, lanes)

    def add(self, address: Bits, lanes: Lanes, values: Bits) -> Bits:
        """Add to numbers, a thread after the other; returns what each found there."""
        first = self._first(address, lanes, values.dtype.itemsize)
        self._note_add(first, lanes, values.dtype.itemsize)
        return _add(self.data.view(values.dtype), first // values.dtype.itemsize, values)

    def rows(self, address: Bits, lanes: Lanes) -> NDArray[np.uint8]:
        """Rows of 16 bytes of an 8 x 8 matrix of halves: (threads, 16)."""
        first = self._first(address, lanes, 16)
        self._note_read(first, lanes, 16)
        return self.data.reshape(-1, 16)[first // 16]

    def at(
        self, program: int, address: NDArray[np.int64], warps: Iterable[int]
    ) -> NDArray[np.uint8]:
        """Bytes of one program for these warps' tensor cores."""
        if address.max(initial=0) >= self.size:
            what = f"byte {address.max()} of shared memory"
            raise MemoryAccessError(f"{what}, which has {self.size}")
        place = program * self._stride + address
        if self._writer[place].any():
            raise MemoryAccessError("a warpgroup reads before a barrier what a warp wrote")
        for warp in warps:
            self._readers[place] |= np.uint16(1 << warp)
        return self.data[place]

    def copy(self, address: Bits, lanes: Lanes, data: NDArray[np.uint8]) -> None:
        """Begin to copy (threads, bytes) to an address of each thread."""
        first = self._first(address, lanes, data.shape[1])
        self._note_write(first, lanes, data.shape[1])
        self.data[first[:, None] + np.arange(data.shape[1])] = POISON
        self._open.append(_Copy(lanes, self._groups[lanes].copy(), first, data))

    def close_group(self, lanes: Lanes) -> None:
        """What the threads copy from now on belongs to a next group."""
        self._groups[lanes] += 1

    def wait_for_groups(self, lanes: Lanes, pending: int) -> None:
        """All but so many of the threads' closed groups have landed."""
        waits = np.zeros(len(self._groups), bool)
        waits[lanes] = True
        for copy in self._open:
            lands = waits[copy.lanes] & (copy.group < self._groups[copy.lanes] - pending)
            if not lands.any():
                continue
            place, data = copy.place[lands], copy.data[lands]
            size = data.shape[1]
            self.data[place[:, None] + np.arange(size)] = data
            self._note_write(place, copy.lanes[lands], size)
            kept = ~lands
            copy.lanes, copy.group = copy.lanes[kept], copy.group[kept]
            copy.place, copy.data = copy.place[kept], copy.data[kept]
        self._open = [copy for copy in self._open if len(copy.lanes)]

    def barrier(self, programs: NDArray[np.intp]) -> None:
        """All warps of these programs have seen what was written before."""
        for program in programs:
            part = slice(program * self._stride, (program + 1) * self._stride)
            self._writer[part] = 0
            self._readers[part] = 0

    def _first(self, address: Bits, lanes: Lanes, size: int) -> NDArray[np.intp]:
        """The index of each thread's first byte."""
        address = address[lanes].astype(np.intp)
        wrong = (address % size != 0) | (address < 0) | (address + size > self.size)
        if wrong.any():
            what = f"{size} bytes at {address[wrong][0]} of shared memory"
            raise MemoryAccessError(f"{what}, which has {self.size}")
        self._count_conflicts(address, lanes, size)
        return lanes // self.threads * self._stride + address

    def _count_conflicts(self, address: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        """Turns that the banks take, and the fewest that they could."""
        if self.traffic is None or not len(lanes):
            return
        words = max(1, size // 4)
        # As many threads at a time as can have 128 bytes together.
        batch = lanes // (WARP // words)
        word = ((batch[:, None] << 32) + (address // 4)[:, None] + np.arange(words)).ravel()
        word.sort()
        word = word[np.diff(word, prepend=-1) != 0]  # the same word is read once for all
        batch = word >> 32
        in_bank = np.bincount((batch - batch[0]) * BANKS + word % BANKS)
        turns = np.maximum.reduceat(in_bank, np.arange(0, len(in_bank), BANKS))
        self.traffic["shared turns"] += int(turns.sum())
        self.traffic["shared turns at best"] += int(np.count_nonzero(turns))

    def _warps(self, lanes: Lanes) -> NDArray[np.intp]:
        return lanes % self.threads // WARP

    def _note_read(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        every = first[:, None] + np.arange(size)
        warp = self._warps(lanes)[:, None]
        writer = self._writer[every]
        if ((writer != 0) & (writer != warp + 1)).any():
            self._race("read before a barrier what another warp wrote", first, lanes)
        for one in np.unique(warp):
            self._readers[every[warp[:, 0] == one]] |= np.uint16(1 << int(one))

    def _note_write(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        every = first[:, None] + np.arange(size)
        warp = self._warps(lanes)[:, None]
        writer, readers = self._writer[every], self._readers[every]
        if ((writer != 0) & (writer != warp + 1)).any():
            self._race("wrote where another warp had written since the last barrier", first, lanes)
        if (readers & ~(1 << warp).astype(np.uint16)).any():
            self._race("wrote what another warp read since the last barrier", first, lanes)
        self._writer[every] = warp + 1

    def _note_add(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        """All warps may add at a place, but not between other accesses."""
        every = first[:, None] + np.arange(size)
        warp = self._warps(lanes)[:, None]
        writer, readers = self._writer[every], self._readers[every]
        mixed = (writer != 0) & (writer != _ADDED) & (writer != warp + 1)
        if mixed.any() or (readers & ~(1 << warp).astype(np.uint16)).any():
            self._race("added to what another warp touched since the last barrier", first, lanes)
        self._writer[every] = _ADDED

    def _race(self, what: str, first: NDArray[np.intp], lanes: Lanes) -> None:
        where = f"shared memory near byte {int(first[0]) % self._stride}"
        raise MemoryAccessError(f"a warp {what}: {where}, thread {int(lanes[0]) % self.threads}")
