"""Global memory, as a program sees it: what is wrong on a GPU is an error here.

It is that of this process, but only allocations that were handed to the kernel may be touched, at
multiples of what is moved at once.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ptx_machine.numbers import Bits

Lanes = NDArray[np.intp]  # numbers of threads
Mask = NDArray[np.bool_]
SECTOR = 32  # bytes that global memory moves at least
WARP = 32


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
            found[chosen] = add_in_order(view, place, values[chosen])
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
        only = self._only_owner(address, size)
        if only is not None:
            return [(slice(None), *self._numbers(only, address, width))]
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
            places.append((chosen, *self._numbers(one, address[chosen], width)))
        return places

    def _numbers(self, owner: int, address: Bits, width: int) -> tuple[Bits, NDArray[np.intp]]:
        """An allocation's numbers, and the index of each address."""
        view = self._views[owner]
        place = ((address - self._bases[owner]) // np.uint64(width)).astype(np.intp)
        return view[: len(view) // width * width].view(f"u{width}"), place

    def _only_owner(self, address: Bits, size: int) -> int | None:
        """The allocation in which all lie, if it is one."""
        first, last = address.min(), address.max()
        owner = int(np.searchsorted(self._bases, first, side="right")) - 1
        return owner if owner >= 0 and last <= self._ends[owner] - np.uint64(size) else None

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


def add_in_order(numbers: Bits, place: NDArray[np.intp], values: Bits) -> Bits:
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
