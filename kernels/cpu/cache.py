"""The KV cache in the library's layout: one arena, block after block."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision, precisions
from appliance.kernels.cache.state_format import StateFormat
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.step_structs import CacheLayerStruct, CacheStruct
from appliance.kernels.cpu.structs import LANES, Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PAGE_TOKENS = LANES
SEALED_TOKENS = 2 * LANES  # tokens whose keys share scales
_FORMATS = {
    KVFormat.FP32: Format.F32,
    KVFormat.FP16: Format.F16,
    KVFormat.BF16: Format.BF16,
    KVFormat.INT8: Format.INT8,
    KVFormat.INT4: Format.INT4,
    KVFormat.INT4_SEALED: Format.SEALED,
    KVFormat.FP8: Format.FP8,
    KVFormat.K8V4: Format.K8V4,
}
_STATE_FORMATS = {
    StateFormat.FP32: Format.F32,
    StateFormat.FP16: Format.F16,
    StateFormat.BF16: Format.BF16,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one kind in a mapping; a rank's part begins at an offset in each.

    Attributes:
        stride: bytes of a row with the parts of all ranks.
        offset: of this rank's part in a row.
    """

    mapping: Mapping
    stride: int
    offset: int = 0

    @property
    def address(self) -> int:
        """Address of this rank's part of the first row."""
        return self.mapping.address + self.offset


@dataclass(frozen=True, slots=True)
class CachePlaces:
    """The places of blocks, open blocks and states; a row holds the parts of all ranks in turn."""

    blocks: Rows
    opened: Rows
    states: Rows


class NativeCache:
    """All physical blocks of all layers; memory is taken when a block is first written.

    Args:
        format: of keys and values, in all layers or in each.
        heads: of each layer, its KV heads and their width.
        block_size: token slots in a block, a multiple of 16; 32 where a layer is sealed.
        num_open: open blocks, for layers that are sealed.
        num_states: state slots, for layers that are recurrent.
        state_bytes: of one slot.
        state_format: of its numbers.
        places: of this rank's parts among the others'; None allocates memory.

    Attributes:
        states: (num_states, state_bytes) uint8; a row is a sequence's state in all layers.

    Raises:
        MemoryError: the system refuses.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        format: KVFormat | Sequence[LayerPrecision],
        heads: Sequence[tuple[int, int]],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
        state_bytes: int = 0,
        state_format: StateFormat = StateFormat.FP32,
        places: CachePlaces | None = None,
    ) -> None:
        assert block_size % PAGE_TOKENS == 0, block_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        layers = (CacheLayerStruct * len(heads))()
        self._constants: list[Tensor] = []  # the library reads them in place
        each = precisions(format, len(heads))
        *offsets, (end, open_end) = layer_offsets(library, each, heads, block_size)
        zipped = zip(layers, each, heads, offsets, strict=True)
        for layer, precision, (num_kv_heads, head_dim), begin in zipped:
            layer.offset, layer.open_offset = begin
            layer.format = _FORMATS[precision.format]
            if precision.format is KVFormat.FP8:
                layer.head_scales = self._constant(precision.head_scales, (2, num_kv_heads), 1.0)
            if precision.key_mean is not None:
                layer.key_mean = self._constant(precision.key_mean, (num_kv_heads, head_dim), 0.0)
        self._layers = layers
        if places is None:
            places = CachePlaces(
                _own(num_blocks, end), _own(num_open, open_end), _own(num_states, state_bytes)
            )
        self.block_bytes = places.blocks.stride
        self.mapping = places.blocks.mapping
        opened = places.opened if places.opened.stride and num_open else None
        self.open_mapping = None if opened is None else opened.mapping
        self._open_address = 0 if opened is None else opened.mapping.address
        self.struct = CacheStruct(
            base=places.blocks.address,
            block_bytes=places.blocks.stride,
            num_blocks=num_blocks,
            block_size=block_size,
            layers=layers,
            open_base=None if opened is None else opened.address,
            open_bytes=0 if opened is None else opened.stride,
            num_open=0 if opened is None else num_open,
        )
        self._slots: Mapping | None = None
        if num_states * places.states.stride:
            self._slots = places.states.mapping
            self.struct.states = places.states.address
            self.struct.state_bytes = places.states.stride
            self.struct.state_format = _STATE_FORMATS[state_format]
            self.struct.num_states = num_states
            count = num_states * places.states.stride
            rows = np.frombuffer(self._slots.memory, dtype=np.uint8, count=count)
        else:
            rows = np.empty(0, dtype=np.uint8)
        rows = rows.reshape(num_states, places.states.stride)
        self.states: Tensor = arrays.of_numpy(rows)

    def _constant(self, tensor: Tensor | None, shape: tuple[int, int], default: float) -> int:
        """Return the address of constant floats."""
        if tensor is None:
            tensor = arrays.of_numpy(np.full(shape, default, dtype=np.float32))
        assert tuple(tensor.shape) == shape, (tensor.shape, shape)
        self._constants.append(tensor.float().contiguous())
        return self._constants[-1].data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks and open blocks, written or not."""
        open_bytes = self.struct.num_open * self.struct.open_bytes
        return self.num_blocks * self.block_bytes + int(open_bytes)

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks, for copy-on-write; no block is both source and destination."""
        base, size = self.mapping.address, self.block_bytes
        for source, destination in zip(sources, destinations, strict=True):
            ctypes.memmove(base + destination * size, base + source * size, size)

    def copy_open(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy open blocks of all layers, for copy-on-write; does nothing if there are none."""
        base, size = self._open_address, self.struct.open_bytes
        for source, destination in zip(sources, destinations, strict=True):
            ctypes.memmove(base + destination * size, base + source * size, size)

    @property
    def open_bytes(self) -> int:
        """Bytes of one open block of all layers; 0 if none is sealed."""
        return 0 if self.open_mapping is None else int(self.struct.open_bytes)

    def read_block(self, block: int, open_block: int = -1) -> bytes:
        """Return a block of all layers as stored, followed by an open block if one is given.

        Slots without a token are included, with undefined content.
        """
        begin = block * self.block_bytes
        content = self.mapping.memory[begin : begin + self.block_bytes]
        if open_block < 0:
            return content
        assert self.open_mapping is not None
        begin = open_block * self.open_bytes
        return content + self.open_mapping.memory[begin : begin + self.open_bytes]

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        """Write the bytes of `read_block` back, into this block or another one."""
        size, view = self.block_bytes, memoryview(content)
        assert len(view) == size + (self.open_bytes if open_block >= 0 else 0), len(view)
        self.mapping.memory[block * size : (block + 1) * size] = view[:size]
        if open_block >= 0:
            assert self.open_mapping is not None
            begin = open_block * self.open_bytes
            self.open_mapping.memory[begin : begin + self.open_bytes] = view[size:]


def _own(count: int, row_bytes: int) -> Rows:
    return Rows(Mapping.of(max(count * row_bytes, 1)), row_bytes)


def layer_offsets(
    library: ctypes.CDLL,
    layers: Sequence[LayerPrecision],
    heads: Sequence[tuple[int, int]],
    block_size: int,
) -> list[tuple[int, int]]:
    """Return the offsets of layers in a block and in an open block; last, the bytes of both."""
    pages = block_size // PAGE_TOKENS
    end = open_end = 0
    offsets = [(0, 0)]
    for precision, (num_kv_heads, head_dim) in zip(layers, heads, strict=True):
        end += num_kv_heads * pages * page_bytes(library, precision.format, head_dim)
        if precision.format.is_sealed:
            assert block_size == SEALED_TOKENS, block_size
            open_end += num_kv_heads * pages * page_bytes(library, KVFormat.INT8, head_dim)
        offsets.append((end, open_end))
    return offsets


def page_bytes(library: ctypes.CDLL, format: KVFormat, head_dim: int) -> int:
    """Return the bytes of a page: 16 tokens of one head, keys and values.

    Raises:
        ValueError: the library has no such pages.
    """
    size = int(library.ap_page_bytes(_FORMATS[format], head_dim))
    if size < 0:
        raise ValueError(f"no {format.value} cache pages for heads of {head_dim} elements")
    return size


def bytes_per_token(
    library: ctypes.CDLL, format: KVFormat, num_kv_heads: int, head_dim: int
) -> int:
    """Return the bytes of one token in one layer."""
    return num_kv_heads * page_bytes(library, format, head_dim) // PAGE_TOKENS


class StepCache:
    """A cache in float32 for steps that leave nothing: all layers share it, and it only grows.

    Args:
        kv_heads: number and width of a layer's key heads, the same in all layers.
    """

    def __init__(self, library: ctypes.CDLL, kv_heads: tuple[int, int]) -> None:
        self._library, self._kv_heads = library, kv_heads
        self._cache: NativeCache | None = None

    def room_for(self, num_blocks: int) -> NativeCache:
        """Return the cache, with so many blocks of `PAGE_TOKENS` at least."""
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # before the larger one is there
            self._cache = NativeCache(
                self._library,
                KVFormat.FP32,
                [self._kv_heads],
                num_blocks=num_blocks,
                block_size=PAGE_TOKENS,
            )
        return self._cache
