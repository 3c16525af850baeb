"""Runs a vision tower: pictures side by side through a decoder's executor, each seeing itself.

Imports torch for the torch executor alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from appliance.model.shard.stage import Stage
from appliance.model.vision.clipping import read_bounds
from appliance.model.vision.positions import patch_places, window_order
from appliance.model.vision.projector import PatchEmbedding, Projector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.native import NativeDecoder
    from appliance.model.native_loader import KeptWeights
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
    """A run of a tower's layers on one executor."""

    def __call__(
        self, stream: Any, axes: NDArray[np.int64], lengths: Sequence[int], taps: Sequence[int]
    ) -> tuple[Any, Any | None]:
        """Run the layers, and the last norm after the tower's last if it has one.

        Args:
            stream: (num_patches, hidden_size), of all pictures.
            axes: (3, num_patches), 0 and each patch's row and column.
            lengths: patches that see each other.
            taps: layers of the run whose output is wanted, too, ascending.

        Returns:
            (num_patches, hidden_size), and (num_patches, len(taps), hidden_size) or None.
        """
        ...


@dataclass(frozen=True, slots=True)
class Tower:
    """A vision tower with its weights.

    Attributes:
        runs: of its layers; see `TowerSpec.runs`.
    """

    spec: TowerSpec
    patches: PatchEmbedding
    runs: tuple[Layers, ...]
    projector: Projector
    taps: tuple[Projector, ...]

    def __call__(self, pictures: Sequence[PatchGrid]) -> list[PictureRows]:
        """Encode pictures; each result depends on its picture alone."""
        if self.spec.windows is not None:
            return self._by_windows(pictures, self.spec.windows.cells)
        places = [patch_places(one.rows, one.columns, self.spec.merge) for one in pictures]
        return self._encoded(pictures, places, [len(one.patches) for one in pictures])

    def _by_windows(self, pictures: Sequence[PatchGrid], side: int) -> list[PictureRows]:
        """Encode pictures whose patches are laid out window by window."""
        merge, ordered, places, backs = self.spec.merge, [], [], []
        windows: list[int] = []
        for one in pictures:
            cells, counts = window_order(one.rows // merge, one.columns // merge, side)
            patches = (cells[:, None] * merge**2 + np.arange(merge**2)).ravel()
            ordered.append(replace(one, patches=one.patches[patches]))
            places.append(patch_places(one.rows, one.columns, merge)[:, patches])
            backs.append(np.argsort(cells))
            windows += [count * merge**2 for count in counts]
        found = self._encoded(ordered, places, windows)
        return [PictureRows(one.embeddings[back]) for one, back in zip(found, backs, strict=True)]

    def _encoded(
        self,
        pictures: Sequence[PatchGrid],
        places: Sequence[NDArray[np.int64]],
        windows: Sequence[int],
    ) -> list[PictureRows]:
        """Encode pictures.

        Args:
            places: row and column of each patch, (2, num_patches) of each picture.
            windows: patches that see each other in layers with windows.
        """
        stream = arrays.cat(
            [
                self.patches(one.patches, where, (one.rows, one.columns))
                for one, where in zip(pictures, places, strict=True)
            ]
        )
        first = int(bool(self.spec.first_row))  # rows before each picture's patches
        lengths = [first + len(one.patches) for one in pictures]
        axes = np.zeros((3, sum(lengths)), np.int64)
        axes[1:] = np.concatenate([np.pad(where, ((0, 0), (first, 0))) for where in places], 1)
        taps, tapped = [layer for layer, _ in self.spec.taps], None
        for layers, (_, in_windows) in zip(self.runs, self.spec.runs, strict=True):
            stream, tapped = layers(stream, axes, windows if in_windows else lengths, taps)
        if first:
            kept = np.delete(np.arange(len(stream)), [*accumulate(lengths[:-1], initial=0)])
            stream, lengths = stream[kept], [length - first for length in lengths]
        rows = self.projector(stream)
        addends = None
        if tapped is not None:
            addends = arrays.stack([one(tapped[:, place]) for place, one in enumerate(self.taps)])
        ends = [*accumulate((n // self.spec.merge**2 for n in lengths), initial=0)]
        return [
            PictureRows(rows[first:last], None if addends is None else addends[:, first:last])
            for first, last in pairwise(ends)
        ]


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """A run of a tower's layers in the C library; see `Layers`.

    Keys and values of a layer are read before the next layer's are written, so all share one cache.

    Attributes:
        norms: the last norm follows.
    """

    decoder: NativeDecoder
    cache: StepCache
    norms: bool

    def __call__(
        self, stream: Any, axes: NDArray[np.int64], lengths: Sequence[int], taps: Sequence[int]
    ) -> tuple[Any, Any | None]:
        count = len(stream)
        counts = np.asarray(lengths, dtype=np.int32)
        blocks = -(-counts // PAGE_TOKENS)
        firsts = np.cumsum(blocks, dtype=np.int32) - blocks
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        own = np.arange(count) - np.repeat(starts[:-1], counts)
        cache = self.cache.room_for(int(blocks.sum()))
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
            hidden=hidden if self.norms else None,
            given=stream,
            streams=None if self.norms else hidden,
            layers=tuple(layer + 1 for layer in taps),  # recorded before the layer behind
            recorded=tapped,
        )
        return hidden, tapped


def load_native_tower(
    source: TowerSource,
    engine: NativeEngine,
    dtype: Any,
    on_progress: Callable[[str, int, int], None] | None = None,
    kept: KeptWeights | None = None,
) -> Tower:
    """Read a tower's weights for the C library, or map those of its layers as they were laid out.

    Args:
        source: opened without torch.
        dtype: of the weights.
        on_progress: called with a stage, the number of parts done, and their total.
        kept: where layers are kept as laid out; those whose linears clip are not.

    Raises:
        CheckpointError: a weight holds NaN or infinity, or is missing.
        MemoryError: the system has too little memory for the weights.
    """
    report = on_progress or (lambda stage, done, total: None)
    packer = WeightPacker(engine, Arena(), dtype)

    def make(weight: Any, bias: Any) -> LibraryLinear:
        return LibraryLinear(engine, packer.linear(weight.contiguous(), bias), packer.arena)

    whole = source.layers.spec
    if not whole.layers:
        return make_tower(source, (), make)
    mixer = next(iter(whole.attention_layers.values()))
    cache = StepCache(engine.library, (mixer.num_kv_heads, mixer.head_dim))
    bounds = (*(first for first, _ in source.spec.runs), len(whole.layers))
    clips = read_bounds(source)
    runs = []
    for rank in range(len(bounds) - 1):
        part, before = Stage.of(whole, bounds, rank), bounds[rank] + rank

        def of_run(stage: str, done: int, total: int, before: int = before) -> None:
            report(stage, before + done, len(whole.layers) + len(bounds) - 1)

        keeps = None if clips else kept
        decoder = load_native(source.layers, engine, dtype, of_run, part=part, kept=keeps)
        for index in range(decoder.model.num_layers):
            decoder.model.layers[index].cache_layer = 0
            if clips:
                clips[bounds[rank] + index].put(decoder.model.layers[index], packer)
        runs.append(NativeLayers(decoder, cache, part.is_last and source.spec.last_norm))
    return make_tower(source, runs, make)


def make_tower(
    source: TowerSource, runs: Sequence[Layers], make: Callable[[Any, Any], Any]
) -> Tower:
    """Build a tower around its layers; `make` lays out the linears before and after them."""
    spec = source.spec
    assert len(runs) <= 1 or not spec.taps, "a run has numbers of layers of its own"
    return Tower(
        spec,
        PatchEmbedding.of(source, make),
        tuple(runs),
        Projector.of(source, spec.projector, spec.merge, make),
        tuple(Projector.of(source, one, spec.merge, make) for _, one in spec.taps),
    )
