"""The cache of one layer in the sealed form: closed blocks of 4 bits, and a side pool of open ones.

A closed block has one scale and offset for each channel of its keys, so it can be made only when
all its tokens are known. Until then they lie in an open block of 8 bits. Open blocks are a pool of
their own, because cutting all blocks as large as an open one would waste half of the memory.

Who uses it:

- The block manager gives a block an open block when it becomes writable, and takes it back when the
  block is full. A block is hashed, shared or swapped only when it is closed; copy-on-write copies
  its open block (`copy_open`).
- A step writes new keys and values to open blocks: `write_kv` and `rotate_and_write` take `open` as
  the cache, and slots counted in open blocks (`SealedSpans.slot_mapping`).
- Then the blocks that the step fills are sealed, and only then attention runs, on all of this:
  `RaggedBatch.of` has cut the rows at blocks. Each piece has so many leading tokens in closed
  blocks, found through the block table, and the others in its open block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SealedBlocks:
    """One layer's closed and open blocks."""

    closed: KVPages  # of a sealed format
    open: KVPages  # INT8

    @classmethod
    def allocate(
        cls,
        *,
        num_blocks: int,
        num_open: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        format: KVFormat = KVFormat.INT4_SEALED,
    ) -> SealedBlocks:
        """Allocate zeroed pages: closed blocks of a sealed format, and open blocks."""
        closed, opened = (
            KVPages.allocate(
                kind,
                num_blocks=count,
                block_size=32,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                device=device,
            )
            for kind, count in (
                (format, num_blocks),
                (KVFormat.INT8, num_open),
            )
        )
        return cls(closed, opened)

    @property
    def format(self) -> KVFormat:
        """The format of closed blocks."""
        return self.closed.format

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.closed.block_size

    @property
    def num_blocks(self) -> int:
        return self.closed.num_blocks

    @property
    def num_kv_heads(self) -> int:
        return self.closed.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.closed.head_dim

    def gather(
        self,
        table: Sequence[int],
        open_table: Sequence[int],
        sealed: int,
        context: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        """Return a sequence's dequantized keys and values: (context, num_kv_heads, head_dim)."""
        closed = self.closed.gather(table, sealed, dtype)
        opened = self.open.gather(open_table, context - sealed, dtype)
        return tuple(torch.cat(parts) for parts in zip(closed, opened, strict=True))

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Do nothing: copy-on-write copies only open blocks; see `copy_open`."""

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy open blocks, for copy-on-write."""
        self.open.copy_blocks(sources, destinations)
