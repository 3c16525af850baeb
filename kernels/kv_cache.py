"""The KV cache of one layer: which bytes lie where, for every precision.

Shared by all kernels; imports nothing of ours outside `appliance.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_page.layout import PAGE_TOKENS, page_bytes
from appliance.kernels.kv_page.reference import read_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class KVFormat(Enum):
    """Storage format of keys and values; those noted as pages exist in `KVPages` only."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # symmetric, one float16 scale per token and KV head
    # Keys rotated; a float16 scale and offset per token and KV head. Pages, and the CPU library.
    INT4 = "int4"
    FP8 = "fp8"  # E4M3, one calibrated scale per KV head; pages
    # Keys by channel over a full block, values with scale and offset per token and KV head; the
    # last tokens lie in pages of INT8 until their block is sealed. `SealedPages`.
    INT4_SEALED = "int4-sealed"
    K8V4 = "k8v4"  # keys as INT8, values as INT4; sealed as well

    @property
    def storage_dtype(self) -> torch.dtype:
        """Element type of `KVBlocks.keys` and `.values`.

        Raises:
            ValueError: these blocks cannot be held as tensors.
        """
        if self not in _STORAGE_DTYPE:
            raise ValueError(f"{self.value} blocks cannot be held as tensors of elements")
        return _STORAGE_DTYPE[self]

    @property
    def is_quantized(self) -> bool:
        """True if scales accompany the elements."""
        return self not in (KVFormat.FP32, KVFormat.FP16, KVFormat.BF16)

    @property
    def is_sealed(self) -> bool:
        """True if a block's tokens are INT8 until it is full, and then take their last form."""
        return self in (KVFormat.INT4_SEALED, KVFormat.K8V4)

    @property
    def has_elements(self) -> bool:
        """True if blocks can be tensors of elements, `KVBlocks`."""
        return self in _STORAGE_DTYPE

    @property
    def is_rotated(self) -> bool:
        """True if keys and their queries are Hadamard-transformed after RoPE."""
        return self is KVFormat.INT4

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
class LayerPrecision:
    """Storage of one layer's keys and values.

    Attributes:
        format: in which elements or codes.
        head_scales: (2, num_kv_heads) float32, of keys and of values; FP8, None is 1.
        key_mean: (num_kv_heads, head_dim) float32, taken off every key after RoPE. It moves all
            scores of a query by the same amount, which a softmax does not see.
    """

    format: KVFormat
    head_scales: Tensor | None = None
    key_mean: Tensor | None = None


def precisions(
    format: KVFormat | Sequence[LayerPrecision], num_layers: int
) -> Sequence[LayerPrecision]:
    """One for each layer, where a single format stands for all of them."""
    if isinstance(format, KVFormat):
        return (LayerPrecision(format),) * num_layers
    assert len(format) == num_layers, (len(format), num_layers)
    return format


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """All physical blocks of one layer in their natural order, as torch operations take them.

    Block b, offset o is slot b * block_size + o.
    """

    format: KVFormat
    keys: Tensor  # (num_blocks, block_size, num_kv_heads, head_dim), format.storage_dtype
    values: Tensor  # same shape and dtype
    key_scales: Tensor | None  # (num_blocks, block_size, num_kv_heads) float16, INT8 only
    value_scales: Tensor | None
    key_mean: Tensor | None = None  # (num_kv_heads, head_dim) float32, taken off all keys

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
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.keys.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[3]

    def gather(self, table: Sequence[int], context: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """One sequence's keys and values, dequantized: (context, num_kv_heads, head_dim) each."""
        used = table[: -(-context // self.block_size)]
        index = torch.tensor(used, dtype=torch.int64, device=self.keys.device)
        found = []
        for blocks, scales in (self.keys, self.key_scales), (self.values, self.value_scales):
            x = blocks[index].flatten(0, 1)[:context].to(dtype)
            if scales is not None:
                x = x * scales[index].flatten(0, 1)[:context].to(dtype).unsqueeze(-1)
            found.append(x)
        return tuple(found)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that a block consists of: tensors (num_blocks, ...)."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks inside the cache, for copy-on-write."""
        for tensor in self.parts:
            tensor[destinations] = tensor[sources]


@dataclass(frozen=True, slots=True)
class KVPages:
    """All physical blocks of one layer as pages, one per block and KV head, for the GPU kernels.

    A page holds all that a program reads of 32 tokens in one piece: elements of keys, elements of
    values, and if they are quantized a record of scales. `kv_page.layout` says where what lies.
    """

    format: KVFormat
    head_dim: int
    pages: Tensor  # (num_blocks, num_kv_heads, page bytes) uint8
    elements: Tensor  # the same memory in the dtype of the elements; int32 if quantized
    halves: Tensor  # the same memory as float16, for scales
    head_scales: Tensor | None  # (2, num_kv_heads) float32, of keys and of values; FP8 only
    key_mean: Tensor | None = None  # (num_kv_heads, head_dim) float32, taken off all keys

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
    ) -> KVPages:
        """Allocate zeroed pages.

        Raises:
            ValueError: a block does not hold as many tokens as a page.
        """
        if block_size != PAGE_TOKENS:
            raise ValueError(f"blocks of the GPU hold {PAGE_TOKENS} tokens, not {block_size}")
        size = page_bytes(format.value, head_dim)
        pages = torch.zeros((num_blocks, num_kv_heads, size), dtype=torch.uint8, device=device)
        dtype = torch.int32 if format.is_quantized else format.storage_dtype
        scales = None
        if format is KVFormat.FP8:
            scales = torch.ones((2, num_kv_heads), dtype=torch.float32, device=device)
        return cls(format, head_dim, pages, pages.view(dtype), pages.view(torch.float16), scales)

    @staticmethod
    def bytes_per_token(format: KVFormat, num_kv_heads: int, head_dim: int) -> int:
        """Bytes that one token takes in one layer, keys and values and scales."""
        return num_kv_heads * page_bytes(format.value, head_dim) // PAGE_TOKENS

    @property
    def num_blocks(self) -> int:
        return self.pages.shape[0]

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return PAGE_TOKENS

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[1]

    def gather(self, table: Sequence[int], context: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """One sequence's keys and values, dequantized: (context, num_kv_heads, head_dim) each."""
        used = table[: -(-context // PAGE_TOKENS)]
        index = torch.tensor(used, dtype=torch.int64, device=self.pages.device)
        keys, values = read_pages(
            self.pages[index], self.format.value, self.head_dim, self.head_scales
        )
        return keys[:context].to(dtype), values[:context].to(dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that a block consists of: tensors (num_blocks, ...)."""
        return (self.pages,)

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks inside the cache, for copy-on-write."""
        self.pages[destinations] = self.pages[sources]


LayerCache = KVBlocks | KVPages
