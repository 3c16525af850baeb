"""The CPU library's pages: a cache of two layers, and what its bytes mean, in numpy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from appliance.kernels.cpu.step_structs import CacheLayerStruct, CacheStruct
from appliance.kernels.cpu.structs import AttentionStruct, Format

Array = NDArray[Any]

PAGE = 16
LAYER = 1  # of two layers; the other one stays poisoned
FORMATS = [format for format in Format if format < Format.E2M1]  # the other formats are for weights
SEALED = (Format.SEALED, Format.K8V4)
INTEGER = (Format.INT8, Format.INT4, *SEALED)
BLOCK = 32  # of sealed layers


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

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
    """An arena of two layers, filled with 0xff at first: NaN, or the code 255.

    Block b of a sealed layer has the open block b. Every write is sealed at once: a block that is
    not full is sealed again with the next token.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: Shape,
        format: Format,
        num_blocks: int,
        fill: int = 0xFF,
        key_mean: Array | None = None,
    ) -> None:
        if format in SEALED:
            shape = replace(shape, block_size=BLOCK)
        self.library, self.shape, self.format = library, shape, format
        self.page_bytes = library.ap_page_bytes(format, shape.head_dim)
        assert self.page_bytes > 0
        assert self.page_bytes % 64 == 0
        pages = shape.num_kv_heads * (shape.block_size // PAGE)
        self.offset = library.ap_page_bytes(Format.F32, shape.head_dim) * pages
        self.block_bytes = self.offset + self.page_bytes * pages
        self.arena = aligned(num_blocks * self.block_bytes)
        self.arena.fill(fill)
        # Scales of keys and of values, slightly different from head to head
        self.head_scales = 0.02 + 0.001 * np.arange(2 * shape.num_kv_heads, dtype=np.float32)
        self.key_mean = np.zeros((shape.num_kv_heads, shape.head_dim), np.float32)
        if key_mean is not None:
            self.key_mean += key_mean
        self.layers = (CacheLayerStruct * 2)(
            CacheLayerStruct(format=Format.F32),
            CacheLayerStruct(
                offset=self.offset,
                head_scales=address(self.head_scales),
                key_mean=None if key_mean is None else address(self.key_mean),
                format=format,
            ),
        )
        self.struct = CacheStruct(
            base=address(self.arena),
            block_bytes=self.block_bytes,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            layers=self.layers,
        )
        self.open_bytes = library.ap_page_bytes(Format.INT8, shape.head_dim) * pages
        self.open = aligned(num_blocks * self.open_bytes)
        self.open.fill(fill)
        if format in SEALED:
            self.struct.open_base = address(self.open)
            self.struct.open_bytes, self.struct.num_open = self.open_bytes, num_blocks
        # Sinks from far below the scores to far above them.
        self.sinks = np.linspace(-30, 30, shape.num_heads, dtype=np.float32)
        self.attention = AttentionStruct(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            scale=shape.scale,
            softcap=shape.softcap,
            sinks=address(self.sinks) if shape.sinks else None,
        )

    def write(self, engine: int, key: Array, value: Array, slots: Sequence[int]) -> None:
        slot_mapping = np.array(slots, np.int64)
        key, value = np.ascontiguousarray(key), np.ascontiguousarray(value)
        self.library.section_write(
            engine,
            self.attention,
            self.struct,
            LAYER,
            address(key),
            address(value),
            len(slots),
            address(slot_mapping),
        )
        if self.format in SEALED:
            self.seal(engine, sorted({slot // BLOCK for slot in slots}))

    def seal(self, engine: int, blocks: Sequence[int]) -> None:
        """Seal blocks from their open blocks."""
        numbers = np.array(blocks, np.int32)
        arguments = (engine, self.attention, self.struct, LAYER, len(numbers))
        self.library.section_seal(*arguments, address(numbers), address(numbers))

    def pages(self, block: int) -> NDArray[np.uint8]:
        """(num_kv_heads, pages in a block, page_bytes)."""
        start = block * self.block_bytes + self.offset
        end = (block + 1) * self.block_bytes
        return self.arena[start:end].reshape(self.shape.num_kv_heads, -1, self.page_bytes)

    def open_pages(self, block: int) -> NDArray[np.uint8]:
        """The pages of a block's open block."""
        opened = self.open[block * self.open_bytes : (block + 1) * self.open_bytes]
        return opened.reshape(self.shape.num_kv_heads, self.shape.block_size // PAGE, -1)

    def read(
        self, table: Sequence[int], context: int, *, opened: bool = False
    ) -> tuple[Array, Array]:
        """Keys and values of a sequence, (num_kv_heads, context, head_dim) float64."""
        used = -(-context // self.shape.block_size)
        read = self.open_pages if opened else self.pages
        pages = np.concatenate([read(block) for block in table[:used]], axis=1)
        dim, format = self.shape.head_dim, Format.INT8 if opened else self.format
        keys, values = decode(format, dim, pages.reshape(-1, pages.shape[-1]))
        if format is Format.FP8:
            scales = self.head_scales.astype(np.float64).reshape(2, -1, 1)
            keys, values = (
                (x.reshape(self.shape.num_kv_heads, -1) * scale).reshape(x.shape)
                for x, scale in zip((keys, values), scales, strict=True)
            )
        keys, values = (
            x.reshape(self.shape.num_kv_heads, -1, dim)[:, :context] for x in (keys, values)
        )
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
    if format is Format.FP8:
        elements = torch.from_numpy(raw).view(torch.float8_e4m3fn)
        return elements.double().numpy()
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
    if format is Format.K8V4:
        first = 16 * dim
        key_bytes = pages[:, :first].reshape(n, dim // 4, 16, 4).transpose(0, 2, 1, 3)
        keys = key_bytes.reshape(n, 16, dim).astype(int) - 128
    else:
        first = 8 * dim
        key_bytes = pages[:, :first].reshape(n, dim // 8, 1, 16, 4)
        key_codes = np.concatenate([key_bytes & 15, key_bytes >> 4], axis=2)
        keys = key_codes.transpose(0, 3, 1, 2, 4).reshape(n, 16, dim).astype(int)
    end = first + 256 * pairs
    value_bytes = pages[:, first:end].reshape(n, 4, pairs, 1, 16, 4)
    value_codes = np.concatenate([value_bytes & 15, value_bytes >> 4], axis=3)
    values = value_codes.reshape(n, 4, 32 * pairs, 4).transpose(0, 1, 3, 2).reshape(n, 16, -1)
    scales = pages[:, end:].copy().view(np.float16)
    if format is Format.INT4:
        scales = scales.reshape(n, 4, 16)
    return keys, values[..., :dim].astype(int), scales


def decode(format: Format, dim: int, pages: NDArray[np.uint8]) -> tuple[Array, Array]:
    """Keys and values of pages as float64, (pages, 16, head_dim) each."""
    n = len(pages)
    if format in (Format.F32, Format.F16, Format.BF16, Format.FP8):
        elements = float_elements(format, pages.copy()).reshape(n, 2, 16 * dim)
        keys = elements[:, 0].reshape(n, dim, 16).transpose(0, 2, 1)
        return keys, elements[:, 1].reshape(n, 16, dim)
    key_codes, value_codes, halves = codes_of(format, dim, pages)
    scales = halves.astype(np.float64)[..., None]
    with np.errstate(invalid="ignore"):  # unused slots hold NaN
        if format is Format.K8V4:
            values = (value_codes + scales[:, 32:48]) * scales[:, 16:32]
            return key_codes * scales[:, :16], values
        if format is Format.SEALED:
            values = (value_codes + scales[:, 16:32]) * scales[:, :16]
            channels = scales[:, 32 : 32 + dim, 0].reshape(n // 2, 2, 1, dim).repeat(2, axis=0)
            return (key_codes - 8) * channels[:, 0] + channels[:, 1], values
        if format is Format.INT8:
            return key_codes * scales[:, 0], value_codes * scales[:, 1]
        keys = (key_codes + scales[:, 1]) * scales[:, 0]
        return rotate(keys), (value_codes + scales[:, 3]) * scales[:, 2]
