"""Runs a vision tower: pictures side by side through a decoder's executor, each seeing itself.

Imports torch for the torch executor alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from appliance.kernels import arrays
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.cache import PAGE_TOKENS, StepCache
from appliance.kernels.cpu.parts import LibraryLinear
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.rows.ragged import GivenRows, RaggedBatch
from appliance.model.native_loader import load_native
from appliance.model.vision.positions import patch_places
from appliance.model.vision.projector import PatchEmbedding, Projector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.native import NativeDecoder
    from appliance.model.vision.source import TowerSource
    from appliance.model.vision.spec import TowerSpec


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """A picture, or a tile of one, as a tower is given it.

    Attributes:
        patches: (rows * columns, inputs) float32, cell by cell.
        rows: of patches.
    """

    patches: NDArray[np.float32]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Rows of a decoder that a picture became.

    Attributes:
        embeddings: (num_cells, hidden_size), row by row.
        addends: (count, num_cells, hidden_size), see `GivenRows`; None without DeepStack.
    """

    embeddings: Any
    addends: Any | None = None

    @property
    def nbytes(self) -> int:
        added = 0 if self.addends is None else self.addends.nbytes
        return int(self.embeddings.nbytes + added)

    def between(self, first: int, last: int) -> PictureRows:
        """Return some of the rows."""
        addends = None if self.addends is None else self.addends[:, first:last]
        return PictureRows(self.embeddings[first:last], addends)

    @classmethod
    def joined(cls, parts: Sequence[PictureRows]) -> PictureRows:
        """Join the rows of tiles."""
        addends = [part.addends for part in parts if part.addends is not None]
        return cls(
            arrays.cat([part.embeddings for part in parts]),
            arrays.cat(addends, dim=1) if addends else None,
        )


class Layers(Protocol):
    """A tower's layers on one executor."""

    def __call__(
        self, stream: Any, axes: NDArray[np.int64], lengths: Sequence[int], taps: Sequence[int]
    ) -> tuple[Any, Any | None]:
        """Run the layers and the last norm.

        Args:
            stream: (num_patches, hidden_size), of all pictures.
            axes: (3, num_patches), 0 and each patch's row and column.
            lengths: patches of each picture.
            taps: layers whose output is wanted, too, ascending.

        Returns:
            (num_patches, hidden_size), and (num_patches, len(taps), hidden_size) or None.
        """
        ...


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower with its weights."""

    spec: TowerSpec
    patches: PatchEmbedding
    layers: Layers
    projector: Projector
    taps: tuple[Projector, ...]

    def __call__(self, pictures: Sequence[PatchGrid]) -> list[PictureRows]:
        """Encode pictures; each result depends on its picture alone."""
        merge = self.spec.merge
        stream = [self.patches(one.patches, one.rows, one.columns) for one in pictures]
        places = [patch_places(one.rows, one.columns, merge) for one in pictures]
        lengths = [len(one.patches) for one in pictures]
        axes = np.zeros((3, sum(lengths)), np.int64)
        axes[1:] = np.concatenate(places, 1)
        taps = [layer for layer, _ in self.spec.taps]
        hidden, tapped = self.layers(arrays.cat(stream), axes, lengths, taps)
        rows = self.projector(hidden)
        addends = None
        if tapped is not None:
            addends = arrays.stack([one(tapped[:, place]) for place, one in enumerate(self.taps)])
        ends = [*accumulate((length // merge**2 for length in lengths), initial=0)]
        return [
            PictureRows(rows[first:last], None if addends is None else addends[:, first:last])
            for first, last in pairwise(ends)
        ]


@dataclass(slots=True)
class NativeLayers:
    """A tower's layers in the C library; see `Layers`.

    Keys and values of a layer are read before the next layer's are written, so all share one cache.
    """

    decoder: NativeDecoder
    _cache: StepCache = field(init=False)

    def __post_init__(self) -> None:
        mixer = next(iter(self.decoder.spec.attention_layers.values()))
        heads = mixer.num_kv_heads, mixer.head_dim
        self._cache = StepCache(self.decoder.engine.library, heads)

    def __call__(
        self, stream: Any, axes: NDArray[np.int64], lengths: Sequence[int], taps: Sequence[int]
    ) -> tuple[Any, Any | None]:
        count = len(stream)
        counts = np.asarray(lengths, dtype=np.int32)
        blocks = -(-counts // PAGE_TOKENS)
        firsts = np.cumsum(blocks, dtype=np.int32) - blocks
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        own = np.arange(count) - np.repeat(starts[:-1], counts)
        cache = self._cache.room_for(int(blocks.sum()))
        of = arrays.of_numpy
        batch = RaggedBatch(
            query_start=of(starts),
            context_lens=of(counts),
            block_tables=of(
                np.ascontiguousarray(firsts[:, None] + np.arange(blocks.max(), dtype=np.int32))
            ),
            slot_mapping=of(np.repeat(firsts * PAGE_TOKENS, counts).astype(np.int64) + own),
            num_decodes=0,
            host_query_lens=tuple(lengths),
            host_context_lens=tuple(lengths),
            given=GivenRows(of(np.arange(count, dtype=np.int32)), stream),
            axes=of(np.ascontiguousarray(axes)),
        )
        width = self.decoder.spec.hidden_size
        hidden = of(np.empty((count, width), np.float32))
        tapped = of(np.empty((count, len(taps), width), np.float32)) if taps else None
        self.decoder.step_into(
            of(np.zeros(count, np.int64)),
            of(own),
            batch,
            cache,
            None,
            hidden=hidden,
            layers=tuple(layer + 1 for layer in taps),  # recorded before the layer behind
            recorded=tapped,
        )
        return hidden, tapped


def load_native_tower(
    source: TowerSource,
    engine: NativeEngine,
    dtype: Any,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Tower:
    """Read a tower's weights for the C library.

    Args:
        source: opened without torch.
        dtype: of the weights.

    Raises:
        CheckpointError: a weight holds NaN or infinity, or is missing.
        MemoryError: the system has too little memory for the weights.
    """
    packer = WeightPacker(engine, Arena(), dtype)

    def make(weight: Any, bias: Any) -> LibraryLinear:
        return LibraryLinear(engine, packer.linear(weight.contiguous(), bias), packer.arena)

    decoder = load_native(source.layers, engine, dtype, on_progress)
    for index in range(decoder.model.num_layers):
        decoder.model.layers[index].cache_layer = 0
    return make_tower(source, NativeLayers(decoder), make)


def make_tower(source: TowerSource, layers: Layers, make: Callable[[Any, Any], Any]) -> Tower:
    """Build a tower around its layers; `make` lays out the linears before and after them."""
    spec = source.spec
    return Tower(
        spec,
        PatchEmbedding.of(source, make),
        layers,
        Projector.of(source, spec.projector, spec.merge, make),
        tuple(Projector.of(source, one, spec.merge, make) for _, one in spec.taps),
    )
