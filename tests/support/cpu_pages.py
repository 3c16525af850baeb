"""The CPU library's pages: a cache of two layers, and what its bytes mean, in numpy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from appliance.kernels.cpu.structs import (
    AttentionStruct,
    CacheLayerStruct,
    CacheStruct,
    Format,
    Status,
)

Array = NDArray[Any]

PAGE = 16
LAYER = 1  # of two, the other one stays poisoned
FORMATS = list(Format)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


def aligned(count: int) -> NDArray[np.uint8]:
    memory = np.empty(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count]


def address(array: NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


class Cache:
    """An arena of two layers, filled with 0xff at first: NaN, or the code 255."""

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: Shape,
        format: Format,
        num_blocks: int,
        fill: int = 0xFF,
    ) -> None:
        self.library, self.shape, self.format = library, shape, format
        self.page_bytes = library.ap_page_bytes(format, shape.head_dim)
        assert self.page_bytes > 0
        assert self.page_bytes % 64 == 0
        pages = shape.num_kv_heads * (shape.block_size // PAGE)
        self.offset = library.ap_page_bytes(Format.F32, shape.head_dim) * pages
        self.block_bytes = self.offset + self.page_bytes * pages
        self.arena = aligned(num_blocks * self.block_bytes)
        self.arena.fill(fill)
        self.layers = (CacheLayerStruct * 2)(
            CacheLayerStruct(0, Format.F32, 0), CacheLayerStruct(self.offset, format, 0)
        )
        self.struct = CacheStruct(
            address(self.arena), self.block_bytes, num_blocks, shape.block_size, self.layers
        )
        self.attention = AttentionStruct(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            scale=shape.scale,
            softcap=shape.softcap,
        )

    def write(self, engine: int, key: Array, value: Array, slots: Sequence[int]) -> None:
        slot_mapping = np.array(slots, np.int64)
        key, value = np.ascontiguousarray(key), np.ascontiguousarray(value)
        status = self.library.ap_kv_write(
            engine,
            self.attention,
            self.struct,
            LAYER,
            address(key),
            address(value),
            len(slots),
            address(slot_mapping),
        )
        assert status == Status.OK

    def pages(self, block: int) -> NDArray[np.uint8]:
        """(num_kv_heads, pages in a block, page_bytes)."""
        start = block * self.block_bytes + self.offset
        end = (block + 1) * self.block_bytes
        return self.arena[start:end].reshape(self.shape.num_kv_heads, -1, self.page_bytes)

    def read(self, table: Sequence[int], context: int) -> tuple[Array, Array]:
        """Keys and values of a sequence, (num_kv_heads, context, head_dim) float64."""
        used = -(-context // self.shape.block_size)
        pages = np.concatenate([self.pages(block) for block in table[:used]], axis=1)
        dim = self.shape.head_dim
        both = decode(self.format, dim, pages.reshape(-1, self.page_bytes))
        keys, values = (x.reshape(self.shape.num_kv_heads, -1, dim)[:, :context] for x in both)
        return keys, values


def rotate(x: Array) -> Array:
    """The normalized Hadamard transform of parts of (..., head_dim); its own inverse."""
    size = x.shape[-1] & -x.shape[-1]
    turned: Array = x.reshape(-1, size)
    step = 1
    while step < size:
        a, b = np.moveaxis(turned.reshape(-1, size // (2 * step), 2, step), 2, 0)
        turned = np.stack([a + b, a - b], axis=2).reshape(-1, size)
        step *= 2
    result: Array = turned.reshape(x.shape) / np.sqrt(size)
    return result


def float_elements(format: Format, raw: NDArray[np.uint8]) -> Array:
    if format is Format.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.float32 if format is Format.F32 else np.float16).astype(np.float64)


def codes_of(format: Format, dim: int, pages: NDArray[np.uint8]) -> tuple[Array, Array, Array]:
    """Key and value codes (pages, 16, head_dim), and the float16 vectors at each page's end."""
    n = len(pages)
    if format is Format.INT8:
        key_bytes = pages[:, : 16 * dim].reshape(n, dim // 4, 16, 4).transpose(0, 2, 1, 3)
        value_bytes = pages[:, 16 * dim : 32 * dim].reshape(n, 4, dim, 4).transpose(0, 1, 3, 2)
        scales = pages[:, 32 * dim :].copy().view(np.float16).reshape(n, 2, 16)
        keys = key_bytes.reshape(n, 16, dim).astype(int) - 128
        return keys, value_bytes.reshape(n, 16, dim).view(np.int8).astype(int), scales
    pairs = -(-dim // 32)
    end = 8 * dim + 256 * pairs
    key_bytes = pages[:, : 8 * dim].reshape(n, dim // 8, 1, 16, 4)
    key_codes = np.concatenate([key_bytes & 15, key_bytes >> 4], axis=2)
    keys = key_codes.transpose(0, 3, 1, 2, 4).reshape(n, 16, dim).astype(int)
    value_bytes = pages[:, 8 * dim : end].reshape(n, 4, pairs, 1, 16, 4)
    value_codes = np.concatenate([value_bytes & 15, value_bytes >> 4], axis=3)
    values = value_codes.reshape(n, 4, 32 * pairs, 4).transpose(0, 1, 3, 2).reshape(n, 16, -1)
    scales = pages[:, end:].copy().view(np.float16).reshape(n, 4, 16)
    return keys, values[..., :dim].astype(int), scales


def decode(format: Format, dim: int, pages: NDArray[np.uint8]) -> tuple[Array, Array]:
    """Keys and values of pages as float64, (pages, 16, head_dim) each."""
    n = len(pages)
    if format in (Format.F32, Format.F16, Format.BF16):
        elements = float_elements(format, pages.copy()).reshape(n, 2, 16 * dim)
        keys = elements[:, 0].reshape(n, dim, 16).transpose(0, 2, 1)
        return keys, elements[:, 1].reshape(n, 16, dim)
    key_codes, value_codes, halves = codes_of(format, dim, pages)
    scales = halves.astype(np.float64)[..., None]
    with np.errstate(invalid="ignore"):  # unused slots hold NaN
        if format is Format.INT8:
            return key_codes * scales[:, 0], value_codes * scales[:, 1]
        keys = (key_codes + scales[:, 1]) * scales[:, 0]
        return rotate(keys), (value_codes + scales[:, 3]) * scales[:, 2]
