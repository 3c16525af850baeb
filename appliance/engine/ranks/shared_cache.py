"""Maps the KV cache that all ranks share, in which a block holds one rank's part after another."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.ranks.messages import CacheLayer
from appliance.kernels import arrays
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.cache import CachePlaces, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def describe_layers(layers: Sequence[LayerPrecision]) -> tuple[CacheLayer, ...]:
    """Convert precisions for a message."""
    return tuple(
        CacheLayer(layer.format.value, _numbers(layer.head_scales), _numbers(layer.key_mean))
        for layer in layers
    )


def read_layers(
    layers: Sequence[CacheLayer], *, in_torch: bool = False
) -> tuple[LayerPrecision, ...]:
    """Convert a message's precisions, to arrays of NumPy or torch."""

    def array(rows: tuple[tuple[float, ...], ...] | None) -> Tensor | None:
        found = _array(rows)
        return arrays.in_torch(found) if in_torch and found is not None else found

    return tuple(
        LayerPrecision(KVFormat(layer.format), array(layer.head_scales), array(layer.key_mean))
        for layer in layers
    )


def _numbers(values: Tensor | None) -> tuple[tuple[float, ...], ...] | None:
    return None if values is None else tuple(map(tuple, values.float().tolist()))


def _array(rows: tuple[tuple[float, ...], ...] | None) -> Tensor | None:
    return None if rows is None else arrays.of_numpy(np.array(rows, dtype=np.float32))


def cache_bytes(strides: Sequence[int], counts: Sequence[int]) -> int:
    """Return the bytes of rows of several kinds, each kind page-aligned."""
    return sum(map(_kind_bytes, strides, counts))


def map_cache(
    descriptor: int, strides: Sequence[int], offsets: Sequence[int], counts: Sequence[int]
) -> CachePlaces:
    """Map blocks, open blocks and states, and find a rank's part in each.

    Args:
        descriptor: file in memory of `cache_bytes`.
        strides: bytes of a row with all ranks' parts.
        offsets: of the rank's part.
        counts: of rows.

    Raises:
        MemoryError: the system refuses the mapping.
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
