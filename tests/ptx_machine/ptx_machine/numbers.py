"""Formats of numbers that numpy has no name for, as bits in unsigned integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Bits = NDArray[Any]  # of an unsigned integer
# By width in bits; a predicate has one.
UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def from_bf16(bits: Bits) -> NDArray[np.float32]:
    """Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> Bits:
    """To the nearest, ties to even; a NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def odd_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Of float64, to an odd number where it is not exact: to be rounded to fewer bits once more."""
    near = values.astype(np.float32)
    if values.dtype == np.float32:
        return near
    lost = values - near
    is_even = near.view(np.uint32) & np.uint32(1) == 0
    towards = np.where(lost > 0, np.float32(np.inf), np.float32(-np.inf))
    return np.where((lost != 0) & np.isfinite(near) & is_even, np.nextafter(near, towards), near)


def from_e4m3(bits: Bits) -> NDArray[np.float32]:
    """Exact."""
    codes = torch.from_numpy(np.ascontiguousarray(bits.astype(np.uint8)))
    return codes.view(torch.float8_e4m3fn).float().numpy()


def to_e4m3(values: NDArray[np.float32]) -> Bits:
    """To the nearest, ties to even; what is too large becomes 448."""
    clipped = torch.from_numpy(np.clip(values, np.float32(-448), np.float32(448)))
    return clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def halves(bits: Bits) -> tuple[Bits, Bits]:
    """The lower and the upper half of each number."""
    narrow = {2: np.uint8, 4: np.uint16, 8: np.uint32}[bits.dtype.itemsize]
    shift = bits.dtype.type(4 * bits.dtype.itemsize)
    return bits.astype(narrow), (bits >> shift).astype(narrow)


def joined(low: Bits, high: Bits) -> Bits:
    """The inverse of `halves`."""
    wide = {1: np.uint16, 2: np.uint32, 4: np.uint64}[low.dtype.itemsize]
    low, high = np.broadcast_arrays(low, high)
    both: Bits = low.astype(wide) | (high.astype(wide) << wide(8 * low.dtype.itemsize))
    return both
