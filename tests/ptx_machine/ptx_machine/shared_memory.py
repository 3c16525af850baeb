"""Shared memory, as a program sees it: what is wrong on a GPU is an error here.

What one warp wrote another may touch only after a barrier, and asynchronous copies land as late as
they may.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptx_machine.memory import WARP, Lanes, MemoryAccessError, add_in_order
from ptx_machine.numbers import Bits

BANKS = 32
POISON = 0xFF  # a NaN in every format
_EVERY_BYTE = np.uint64(0x0101010101010101)
_SEVERAL = 0xFF  # the reader of what more than one warp has read, the writer of any warp's sum


@dataclass(slots=True)
class _Copy:
    """An asynchronous copy into shared memory, on its way."""

    lanes: Lanes
    group: NDArray[np.int64]  # of each thread, by number
    place: NDArray[np.intp]  # of each thread's first byte
    data: NDArray[np.uint8]  # (threads, bytes)


@dataclass(frozen=True, slots=True)
class _Marks:
    """What the threads leave at the places of one access, in a table with a byte for each byte."""

    place: NDArray[np.intp]  # of numbers as wide as the marks
    own: Bits  # the mark of each thread's warp, in every byte of a number

    def are_others(self, table: NDArray[np.uint8], but: int = 0) -> bool:
        """Whether a byte has the mark of another warp, and not that one."""
        found = table.view(self.own.dtype)[self.place]
        if not found.any():
            return False
        differs = (found != 0) & (found != self.own)
        marks, own = found[differs].view(np.uint8), self.own[differs].view(np.uint8)
        return bool(((marks != 0) & (marks != own) & (marks != but)).any())

    def set(self, table: NDArray[np.uint8]) -> None:
        table.view(self.own.dtype)[self.place] = self.own

    def set_several(self, table: NDArray[np.uint8]) -> None:
        table.view(self.own.dtype)[self.place] = ~self.own.dtype.type(0)

    def add(self, table: NDArray[np.uint8]) -> None:
        """Set the own mark where there is no other, and else that of several."""
        marks = table.view(self.own.dtype)
        found = marks[self.place]
        if self.own.itemsize > 1 and ((found != 0) & (found != self.own)).any():
            self._by_byte().add(table)
            return
        wanted = np.where(
            (found == 0) | (found == self.own), self.own, self.own.dtype.type(_SEVERAL)
        )
        marks[self.place] = wanted
        lost = marks[self.place] != wanted  # to another of these threads
        if lost.any():
            marks[self.place[lost]] = ~self.own.dtype.type(0)

    def _by_byte(self) -> _Marks:
        width = self.own.itemsize
        place = self.place[..., None] * width + np.arange(width)
        return _Marks(place, self.own[..., None].view(np.uint8))


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
    # By byte, since a barrier: 0, warp + 1 or _SEVERAL
    _writer: NDArray[np.uint8] = field(init=False)
    _reader: NDArray[np.uint8] = field(init=False)
    _open: list[_Copy] = field(init=False, default_factory=list)
    _groups: NDArray[np.int64] = field(init=False)  # that each thread has closed

    def __post_init__(self) -> None:
        self._stride = max(16, -(-self.size // 16) * 16)
        self.data = np.full(self.programs * self._stride, POISON, np.uint8)
        self._writer = np.zeros(self.programs * self._stride, np.uint8)
        self._reader = np.zeros(self.programs * self._stride, np.uint8)
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
        return add_in_order(self.data.view(values.dtype), first // values.dtype.itemsize, values)

    def rows(self, address: Bits, lanes: Lanes) -> NDArray[np.uint8]:
        """Rows of 16 bytes of an 8 x 8 matrix of halves: (threads, 16)."""
        first = self._first(address, lanes, 16)
        self._note_read(first, lanes, 16)
        return self.data.reshape(-1, 16)[first // 16]

    def at(self, program: int, address: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Bytes of one program for a warpgroup's tensor cores."""
        if address.max(initial=0) >= self.size:
            what = f"byte {address.max()} of shared memory"
            raise MemoryAccessError(f"{what}, which has {self.size}")
        place = program * self._stride + address
        if self._writer[place].any():
            raise MemoryAccessError("a warpgroup reads before a barrier what a warp wrote")
        self._reader[place] = _SEVERAL
        return self.data[place]

    def copy(self, address: Bits, lanes: Lanes, data: NDArray[np.uint8]) -> None:
        """Begin to copy (threads, bytes) to an address of each thread."""
        first = self._first(address, lanes, data.shape[1])
        self._note_write(first, lanes, data.shape[1])
        self.data.reshape(-1, data.shape[1])[first // data.shape[1]] = POISON
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
            self.data.reshape(-1, size)[place // size] = data
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
            self._reader[part] = 0

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

    def _marks(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> _Marks:
        width = min(size, 8)  # several bytes at a time
        place = first // width
        own = ((lanes % self.threads // WARP).astype(np.uint64) + 1) * _EVERY_BYTE
        if size > width:
            place = place[:, None] + np.arange(size // width)
            own = np.repeat(own[:, None], size // width, axis=1)
        return _Marks(place, own.astype(f"u{width}"))

    def _note_read(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        marks = self._marks(first, lanes, size)
        if marks.are_others(self._writer):
            self._race("read before a barrier what another warp wrote", first, lanes)
        marks.add(self._reader)

    def _note_write(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        marks = self._marks(first, lanes, size)
        if marks.are_others(self._writer):
            self._race("wrote where another warp had written since the last barrier", first, lanes)
        if marks.are_others(self._reader):
            self._race("wrote what another warp read since the last barrier", first, lanes)
        marks.set(self._writer)

    def _note_add(self, first: NDArray[np.intp], lanes: Lanes, size: int) -> None:
        """All warps may add at a place, but not between other accesses."""
        marks = self._marks(first, lanes, size)
        if marks.are_others(self._writer, but=_SEVERAL) or marks.are_others(self._reader):
            self._race("added to what another warp touched since the last barrier", first, lanes)
        marks.set_several(self._writer)

    def _race(self, what: str, first: NDArray[np.intp], lanes: Lanes) -> None:
        where = f"shared memory near byte {int(first[0]) % self._stride}"
        raise MemoryAccessError(f"a warp {what}: {where}, thread {int(lanes[0]) % self.threads}")
