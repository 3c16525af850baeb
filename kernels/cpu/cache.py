"""The KV cache as the library holds it: one arena, block after block."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.structs import LANES, CacheLayerStruct, CacheStruct, Format
from appliance.kernels.kv_cache import KVFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_TOKENS = LANES
_FORMATS = {
    KVFormat.FP32: Format.F32,
    KVFormat.FP16: Format.F16,
    KVFormat.BF16: Format.BF16,
    KVFormat.INT8: Format.INT8,
    KVFormat.INT4: Format.INT4,
}


class NativeCache:
    """All physical blocks of all layers. Memory is taken as blocks are first written.

    Args:
        library: the loaded library.
        format: how keys and values are stored.
        heads: of each layer, its KV heads and their width.
        num_blocks: physical blocks.
        block_size: token slots in a block, a multiple of 16.

    Raises:
        MemoryError: the system refuses.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        format: KVFormat,
        heads: Sequence[tuple[int, int]],
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        assert block_size % PAGE_TOKENS == 0, block_size
        self.format = format
        self.num_blocks = num_blocks
        self.block_size = block_size
        layers = (CacheLayerStruct * len(heads))()
        end = 0
        for layer, (num_kv_heads, head_dim) in zip(layers, heads, strict=True):
            layer.offset, layer.format = end, _FORMATS[format]
            page = page_bytes(library, format, head_dim)
            end += num_kv_heads * (block_size // PAGE_TOKENS) * page
        self._layers = layers
        self.block_bytes = end
        self._mapping = Mapping.of(num_blocks * end)
        self.struct = CacheStruct(
            base=self._mapping.address,
            block_bytes=end,
            num_blocks=num_blocks,
            block_size=block_size,
            layers=layers,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, written or not."""
        return self.num_blocks * self.block_bytes

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy whole blocks, for copy-on-write; no block is both source and destination."""
        base, size = self._mapping.address, self.block_bytes
        for source, destination in zip(sources, destinations, strict=True):
            ctypes.memmove(base + destination * size, base + source * size, size)


def page_bytes(library: ctypes.CDLL, format: KVFormat, head_dim: int) -> int:
    """Bytes that 16 tokens of one head take, keys and values.

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
    """Bytes that one token takes in one layer."""
    return num_kv_heads * page_bytes(library, format, head_dim) // PAGE_TOKENS
