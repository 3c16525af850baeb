"""Block moves as they are defined, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.cache.kv_cache import KVPages


def block_bytes(layers: Sequence[KVPages]) -> int:
    """Return the bytes of one block in all layers."""
    return sum(layer.pages[0].numel() for layer in layers)


def copy_blocks(layers: Sequence[KVPages], sources: list[int], destinations: list[int]) -> None:
    """Copy blocks inside the cache; no block is both a source and a destination."""
    for layer in layers:
        layer.pages[destinations] = layer.pages[sources]


def swap_out(layers: Sequence[KVPages], blocks: list[int], staging: Tensor) -> None:
    """Gather blocks, layers side by side, into staging (len(blocks), block_bytes) uint8."""
    start = 0
    for layer in layers:
        size = layer.pages[0].numel()
        staging[:, start : start + size] = layer.pages[blocks].flatten(1)
        start += size


def swap_in(layers: Sequence[KVPages], staging: Tensor, blocks: list[int]) -> None:
    """Write the bytes of `swap_out` back, into the same or other blocks."""
    start = 0
    for layer in layers:
        size = layer.pages[0].numel()
        layer.pages[blocks] = staging[:, start : start + size].view(
            len(blocks), *layer.pages[0].shape
        )
        start += size
