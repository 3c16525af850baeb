"""The KV cache of one layer: which bytes lie where, for every precision.

Shared by all kernels; imports nothing of ours outside `appliance.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class KVFormat(Enum):
    """How keys and values are stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # symmetric, one float16 scale per token and KV head
    INT4 = "int4"  # keys rotated; a float16 scale and minimum per token and KV head; CPU library

    @property
    def storage_dtype(self) -> torch.dtype:
        """Element type of `KVBlocks.keys` and `.values`.

        Raises:
            ValueError: these blocks cannot be held as tensors.
        """
        if self not in _STORAGE_DTYPE:
            raise ValueError(f"{self.value} blocks exist in the CPU library only")
        return _STORAGE_DTYPE[self]

    @property
    def is_quantized(self) -> bool:
        """Whether scales accompany the elements."""
        return self in (KVFormat.INT8, KVFormat.INT4)

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that one token takes in one layer, keys and values and scales."""
        per_head = head_dim * self.storage_dtype.itemsize + (2 if self.is_quantized else 0)
        return 2 * num_kv_heads * per_head


_STORAGE_DTYPE = {
    KVFormat.FP32: torch.float32,
    KVFormat.FP16: torch.float16,
    KVFormat.BF16: torch.bfloat16,
    KVFormat.INT8: torch.int8,
}


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """All physical blocks of one layer. Block b, offset o is slot b * block_size + o."""

    format: KVFormat
    keys: Tensor  # (num_blocks, block_size, num_kv_heads, head_dim), format.storage_dtype
    values: Tensor  # same shape and dtype
    key_scales: Tensor | None  # (num_blocks, block_size, num_kv_heads) float16, INT8 only
    value_scales: Tensor | None

    @classmethod
    def allocate(
        cls,
        format: KVFormat,
        *,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> KVBlocks:
        """Allocate zeroed blocks (zeroed, so that a masked read is never NaN)."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        keys = torch.zeros(shape, dtype=format.storage_dtype, device=device)
        scales = (
            torch.zeros(shape[:3], dtype=torch.float16, device=device)
            if format.is_quantized
            else None
        )
        return cls(
            format=format,
            keys=keys,
            values=torch.zeros_like(keys),
            key_scales=scales,
            value_scales=None if scales is None else torch.zeros_like(scales),
        )

    @property
    def num_blocks(self) -> int:
        """Physical blocks."""
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.keys.shape[1]

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks inside the cache, for copy-on-write."""
        for tensor in (self.keys, self.values, self.key_scales, self.value_scales):
            if tensor is not None:
                tensor[destinations] = tensor[sources]


@dataclass(frozen=True, slots=True)
class KVCache:
    """The blocks of all layers, as the torch decoder reads them."""

    layers: tuple[KVBlocks, ...]

    @property
    def num_blocks(self) -> int:
        """Physical blocks of each layer."""
        return self.layers[0].num_blocks

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.layers[0].block_size

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks in every layer, for copy-on-write."""
        for layer in self.layers:
            layer.copy_blocks(sources, destinations)
