"""The KV cache of all layers, as the torch decoder reads it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.kv_cache import KVBlocks, KVPages, LayerCache
from appliance.kernels.cache.sealed_blocks import SealedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision


AnyLayerCache = LayerCache | SealedBlocks


@dataclass(frozen=True, slots=True)
class KVCache:
    """The blocks of all attention layers, and the state slots of all recurrent layers.

    Attributes:
        states: (num_slots, state_bytes) uint8; a row is a sequence's state.
        recurrent: each recurrent layer's tensors (num_slots, ...), views of `states`.
    """

    layers: tuple[AnyLayerCache, ...]
    states: Tensor = field(default_factory=lambda: torch.empty((0, 0), dtype=torch.uint8))
    recurrent: tuple[tuple[Tensor, ...], ...] = ()

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

    def copy_open(self, sources: list[int], destinations: list[int]) -> None:
        """Copy open blocks in the layers that are sealed."""
        for layer in self.layers:
            if isinstance(layer, SealedBlocks):
                layer.copy_open(sources, destinations)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(map(_row_bytes, self.parts))

    @property
    def open_bytes(self) -> int:
        """Bytes of one open block in all layers; 0 if none is sealed."""
        return sum(map(_row_bytes, self.open_parts))

    def read_block(self, block: int, open_block: int = -1) -> bytes:
        """Return a block's bytes, layer by layer, then those of an open block if one is given.

        Empty slots are included, with undefined content. On a GPU `block_copy` moves pages instead,
        without waiting.
        """
        rows = [part[block] for part in self.parts]
        if open_block >= 0:
            rows += [part[open_block] for part in self.open_parts]
        return b"".join(
            row.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes() for row in rows
        )

    def write_block(
        self, block: int, content: bytes | bytearray | memoryview, open_block: int = -1
    ) -> None:
        """Write the bytes of `read_block` back, into this block or another one."""
        places = [part[block] for part in self.parts]
        if open_block >= 0:
            places += [part[open_block] for part in self.open_parts]
        assert len(content) == sum(place.numel() * place.itemsize for place in places)
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        begin = 0
        for place in places:
            end = begin + place.numel() * place.itemsize
            place.copy_(source[begin:end].view(place.dtype).view(place.shape))
            begin = end

    @property
    def parts(self) -> list[Tensor]:
        """Tensors with a row per block, in the order of a block's bytes."""
        closed = (
            layer.closed if isinstance(layer, SealedBlocks) else layer for layer in self.layers
        )
        return [part for layer in closed for part in layer.parts]

    @property
    def open_parts(self) -> list[Tensor]:
        """Tensors with a row per open block of the sealed layers."""
        layers = (layer for layer in self.layers if isinstance(layer, SealedBlocks))
        return [part for layer in layers for part in layer.open.parts]


def split_sealed(layers: Sequence[AnyLayerCache]) -> tuple[list[KVPages], list[KVPages]]:
    """Return the pages of all layers on a GPU, and those of the open blocks of sealed layers."""
    closed = [layer.closed if isinstance(layer, SealedBlocks) else layer for layer in layers]
    opened = [layer.open for layer in layers if isinstance(layer, SealedBlocks)]
    assert all(isinstance(layer, KVPages) for layer in closed), "a GPU keeps all blocks as pages"
    return [layer for layer in closed if isinstance(layer, KVPages)], opened


def _row_bytes(part: Tensor) -> int:
    return part[0].numel() * part.itemsize


def allocate_blocks(
    format: KVFormat,
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> LayerCache:
    """Allocate blocks for torch: in natural order if the format has one, else as pages."""
    kind = KVBlocks if format.has_elements else KVPages
    return kind.allocate(
        format,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=device,
    )


def allocate_layer(
    allocate: Callable[..., LayerCache],
    precision: LayerPrecision,
    *,
    num_blocks: int,
    block_size: int,
    num_open: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    in_rows: bool = False,
) -> AnyLayerCache:
    """Allocate one layer's blocks, and open blocks if it is sealed.

    Args:
        allocate: a backend's `allocate_cache`.
        precision: how the layer is stored.
        block_size: token slots in a block.
        num_open: open blocks, if the layer is sealed.
        in_rows: the layer holds latents, whose codes lie side by side in pages.
    """
    mean = None if precision.key_mean is None else precision.key_mean.float().to(device)
    if precision.format.is_sealed:
        sealed = SealedBlocks.allocate(
            format=precision.format,
            num_blocks=num_blocks,
            num_open=num_open,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=device,
        )
        return replace(sealed, open=replace(sealed.open, key_mean=mean))
    cache = allocate(
        precision.format,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=device,
    )
    if isinstance(cache, KVPages):
        cache = replace(cache, in_rows=in_rows)
    scales = precision.head_scales
    if isinstance(cache, KVPages) and scales is not None:
        return replace(cache, key_mean=mean, head_scales=scales.float().to(device))
    return replace(cache, key_mean=mean)
