"""The KV cache of one layer in memory, for every precision.

Shared by all kernels; imports nothing of ours outside `appliance.kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_page.layout import PAGE_TOKENS, layout_name, page_bytes
from appliance.kernels.kv_page.reference import read_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


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
    key_mean: Tensor | None = None  # (num_kv_heads, head_dim) float32, subtracted from all keys

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
        """Allocate zeroed blocks, so that a masked read is never NaN."""
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
        """Return a sequence's dequantized keys and values: (context, num_kv_heads, head_dim)."""
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
        """The tensors of a block, (num_blocks, ...) each."""
        tensors = (self.keys, self.values, self.key_scales, self.value_scales)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks inside the cache, for copy-on-write."""
        for tensor in self.parts:
            tensor[destinations] = tensor[sources]


@dataclass(frozen=True, slots=True)
class KVPages:
    """All physical blocks of one layer as pages, one per block and KV head, for the GPU kernels.

    A page has all that a program reads of 32 tokens in one piece: elements or codes of keys, those
    of values, and a record of scales if they are quantized. `kv_page.layout` defines it.

    Attributes:
        in_rows: the codes of a token lie side by side, as latents are read.
    """

    format: KVFormat
    head_dim: int
    pages: Tensor  # (num_blocks, num_kv_heads, page bytes) uint8
    elements: Tensor  # the same memory in the dtype of the elements; int32 if quantized
    halves: Tensor  # the same memory as float16, for scales
    head_scales: Tensor | None  # (2, num_kv_heads) float32, of keys and of values; FP8 only
    key_mean: Tensor | None = None  # (num_kv_heads, head_dim) float32, subtracted from all keys
    in_rows: bool = False

    @property
    def layout(self) -> str:
        """The name of the pages' layout."""
        return layout_name(self.format.value, self.in_rows)

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
        """Return the bytes of one token in one layer: keys, values and scales."""
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
        """Return a sequence's dequantized keys and values: (context, num_kv_heads, head_dim)."""
        used = table[: -(-context // PAGE_TOKENS)]
        index = torch.tensor(used, dtype=torch.int64, device=self.pages.device)
        keys, values = read_pages(self.pages[index], self.layout, self.head_dim, self.head_scales)
        return keys[:context].to(dtype), values[:context].to(dtype)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors of a block, (num_blocks, ...) each."""
        return (self.pages,)

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks inside the cache, for copy-on-write."""
        self.pages[destinations] = self.pages[sources]


LayerCache = KVBlocks | KVPages
