"""Maps the KV cache that all ranks share: a block holds one rank's part after another's."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

from appliance.engine.ranks.messages import CacheLayer
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.cache import CachePlaces, Rows
from appliance.kernels.kv_cache import KVFormat, LayerPrecision

if TYPE_CHECKING:
    from collections.abc import Sequence


def describe_layers(layers: Sequence[LayerPrecision]) -> tuple[CacheLayer, ...]:
    """Return precisions as a message holds them."""
    return tuple(
        CacheLayer(layer.format.value, _numbers(layer.head_scales), _numbers(layer.key_mean))
        for layer in layers
    )


def read_layers(layers: Sequence[CacheLayer]) -> tuple[LayerPrecision, ...]:
    """Return the precisions of a message."""
    return tuple(
        LayerPrecision(KVFormat(layer.format), _tensor(layer.head_scales), _tensor(layer.key_mean))
        for layer in layers
    )


def _numbers(tensor: torch.Tensor | None) -> tuple[tuple[float, ...], ...] | None:
    return None if tensor is None else tuple(map(tuple, tensor.float().tolist()))


def _tensor(rows: tuple[tuple[float, ...], ...] | None) -> torch.Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=torch.float32)


def cache_bytes(strides: Sequence[int], counts: Sequence[int]) -> int:
    """Return the bytes of rows of several kinds, each beginning at a page of memory."""
    return sum(map(_kind_bytes, strides, counts))


def map_cache(
    descriptor: int, strides: Sequence[int], offsets: Sequence[int], counts: Sequence[int]
) -> CachePlaces:
    """Map blocks, open pages and states, and find a rank's part in each.

    Args:
        descriptor: of a file in memory of `cache_bytes`.
        strides: bytes of a row with all ranks' parts.
        offsets: of the rank's part.
        counts: of rows.

    Raises:
        MemoryError: the system refuses.
    """
    found, begin = [], 0
    for stride, offset, count in zip(strides, offsets, counts, strict=True):
        size = _kind_bytes(stride, count)
        found.append(Rows(Mapping.shared(descriptor, size, begin), stride, offset))
        begin += size
    blocks, opened, states = found
    return CachePlaces(blocks, opened, states)


def _kind_bytes(stride: int, count: int) -> int:
    return max(-(-stride * count // mmap.PAGESIZE), 1) * mmap.PAGESIZE
