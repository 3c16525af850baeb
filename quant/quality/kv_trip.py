"""Keys and values as they come back from a cache, for layers that are run a whole window at once.

Each place attends to what it would find if its window had been decoded token by token: in the
sealed form, earlier blocks in 4 bits and its own block as it is while it is open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_cache import KVBlocks, KVFormat, KVPages
from appliance.kernels.kv_seal.reference import seal
from appliance.kernels.kv_write import reference as kv_write
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.sealed_pages import SealedPages

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.backend import Backend
    from appliance.kernels.kv_cache import LayerCache

BLOCK_SIZE = 32  # of pages; every backend has it
_PLAIN = {
    KVFormat.FP32: torch.float32,
    KVFormat.FP16: torch.float16,
    KVFormat.BF16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Windows side by side, for one KV format: which rows see which blocks.

    Attributes:
        batch: whole windows; its slots are those of a cache that holds every token once.
        work: what the backend's `plan_attention` made of what rows see.
        num_blocks: of such a cache; a sealed one has twice as many, the second half open.
        is_sealed: whether a row's own block and earlier ones are different blocks.
    """

    batch: RaggedBatch
    work: object
    num_blocks: int
    is_sealed: bool

    @classmethod
    def of(
        cls,
        backend: Backend,
        format: KVFormat,
        num_windows: int,
        length: int,
        device: torch.device,
    ) -> Geometry:
        """Lay windows of `length` tokens out."""
        width = -(-length // BLOCK_SIZE)
        total = num_windows * width
        tables = [tuple(range(i * width, (i + 1) * width)) for i in range(num_windows)]
        whole = RaggedBatch.of(
            [length] * num_windows,
            [length] * num_windows,
            tables,
            block_size=BLOCK_SIZE,
            device=device,
        )
        batch = whole
        if format is KVFormat.INT4_SEALED:
            rows, contexts, own = [], [], []
            for table in tables:
                for number, block in enumerate(table):
                    start = number * BLOCK_SIZE
                    rows.append(min(BLOCK_SIZE, length - start))
                    contexts.append(start + rows[-1])
                    own.append((*table[:number], total + block))
            batch = RaggedBatch.of(rows, contexts, own, block_size=BLOCK_SIZE, device=device)
        work = backend.plan_attention(batch, BLOCK_SIZE)
        return cls(whole, work, total, format is KVFormat.INT4_SEALED)


@dataclass(frozen=True, slots=True)
class TripCache:
    """One layer's cache of float32, filled with what a cache of `format` gives back."""

    format: KVFormat
    blocks: LayerCache
    geometry: Geometry
    head_dim: int
    head_scales: Tensor | None = None  # (2, num_kv_heads) float32; FP8 only
    key_mean: Tensor | None = None  # (num_kv_heads, head_dim) float32, taken off all keys

    @classmethod
    def allocate(
        cls,
        backend: Backend,
        format: KVFormat,
        geometry: Geometry,
        *,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        head_scales: Tensor | None = None,
    ) -> TripCache:
        """Room for the tokens of one geometry."""
        blocks = backend.allocate_cache(
            KVFormat.FP32,
            num_blocks=geometry.num_blocks * (2 if geometry.is_sealed else 1),
            block_size=BLOCK_SIZE,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=device,
        )
        return cls(format, blocks, geometry, head_dim, head_scales)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.blocks.num_kv_heads

    @property
    def num_blocks(self) -> int:
        """Blocks of tokens."""
        return self.geometry.num_blocks

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return BLOCK_SIZE


def through(backend: Backend) -> Backend:
    """The same operations for layers whose cache is a `TripCache`."""

    def write_kv(key: Tensor, value: Tensor, cache: object, slot_mapping: Tensor) -> None:
        assert isinstance(cache, TripCache)
        for number, (keys, values) in enumerate(_trips(cache, key, value)):
            slots = slot_mapping + number * cache.geometry.num_blocks * BLOCK_SIZE
            backend.write_kv(keys, values, cache.blocks, slots)

    def paged_attention(
        query: Tensor,
        cache: object,
        work: object,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        assert isinstance(cache, TripCache)
        work = cache.geometry.work
        return backend.paged_attention(
            query, cache.blocks, work, scale=scale, window=window, softcap=softcap
        )

    return replace(
        backend,
        name=f"{backend.name}, evaluated",
        rotate_and_write=kv_write.rotate_and_write_with(backend.rms_norm, backend.rotary, write_kv),
        paged_attention=paged_attention,
    )


def _trips(cache: TripCache, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What comes back, (num_tokens, num_kv_heads, head_dim) each: closed, then open if sealed."""
    format, slots = cache.format, cache.geometry.batch.slot_mapping
    if format in _PLAIN:
        dtype = _PLAIN[format]
        return [(key.to(dtype).float(), value.to(dtype).float())]
    num_blocks, heads, head_dim = cache.num_blocks, cache.num_kv_heads, cache.head_dim
    if format is KVFormat.INT4_SEALED:
        pages = SealedPages.allocate(
            num_blocks=num_blocks,
            num_open=num_blocks,
            num_kv_heads=heads,
            head_dim=head_dim,
            device=key.device,
        )
        kv_write.write_kv(key, value, pages.open, slots)
        every = list(range(num_blocks))
        seal(pages, every, every)
        return [_read(pages.closed, slots), _read(pages.open, slots)]
    kind = KVBlocks if format is KVFormat.INT8 else KVPages
    stored: LayerCache = kind.allocate(
        format,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=heads,
        head_dim=head_dim,
        device=key.device,
    )
    if cache.head_scales is not None and isinstance(stored, KVPages):
        stored = replace(stored, head_scales=cache.head_scales)
    kv_write.write_kv(key, value, stored, slots)
    return [_read(stored, slots)]


def _read(cache: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    every = range(cache.num_blocks)
    keys, values = cache.gather(every, cache.num_blocks * cache.block_size, torch.float32)
    return keys[slots], values[slots]


def bytes_per_token(format: KVFormat, num_kv_heads: int, head_dim: int) -> float:
    """Bytes of one token in one layer, keys and values and scales; open blocks not counted."""
    if format in (KVFormat.FP8, KVFormat.INT4, KVFormat.INT4_SEALED):
        return KVPages.bytes_per_token(format, num_kv_heads, head_dim)
    return format.bytes_per_token(num_kv_heads, head_dim)
