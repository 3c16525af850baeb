"""Runs calibration rows through a model with one layer in memory, the rest of it on the disk.

Results do not depend on the memory there is: rows always go through a layer in the same portions.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from appliance.kernels.backend import select_backend
from appliance.quant.walk.block import Moments, NothingMoreToSee, observing
from appliance.quant.walk.row_layers import RowLayers
from appliance.quant.walk.stream import ResidualStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.quant.kv.calibrate import AttentionWatch
    from appliance.quant.walk.block import Block, ObservedLinear

TOKENS_AT_ONCE = 512  # of whole rows; a longer row goes alone


def tokens_at_once(row_tokens: int) -> int:
    """How many tokens go through a layer together: those of as many rows as fit, or of one."""
    return max(1, TOKENS_AT_ONCE // row_tokens) * row_tokens


class Walk:
    """Calibration rows on their way through a model.

    Args:
        source: an opened model.
        rows: (num_rows, row_tokens) int64.
        folder: where the residual stream is kept, 4 bytes for each token and hidden element, twice
            while it moves on; made if it is not there.
        device: where layers compute.
        layer: that the rows have reached; the stream before it is in the folder, unless it is 0.
        watch: sees every layer's attention, for `kv`.

    Attributes:
        seconds: spent in layers so far.
    """

    def __init__(
        self,
        source: ModelSource,
        rows: Tensor,
        folder: Path,
        device: torch.device,
        layer: int = 0,
        watch: AttentionWatch | None = None,
    ) -> None:
        self.seconds = 0.0
        self._device = device
        self._num_rows, self._row_tokens = rows.shape
        # The kernels for a GPU keep no float32 cache; in whole rows torch's own do well there.
        choice = "reference" if device.type == "cuda" else "auto"
        backend = observing(select_backend(device, choice))
        if watch is not None:
            backend = watch.on(backend)
        self._layers = RowLayers(source, self._row_tokens, backend, device)
        folder.mkdir(exist_ok=True)
        self._stream = ResidualStream(
            folder, self._num_rows, self._row_tokens, source.spec.hidden_size, layer
        )
        if not self._stream.exists:
            assert layer == 0, f"the stream before layer {layer} is not in {folder}"
            with self._stream.written(0) as writer:
                for portion in self._portions():
                    embedded = self._layers.reader.embed(rows[portion].flatten())
                    writer.write(embedded)

    def block(self, index: int) -> Block:
        """Read a layer, in float32."""
        return self._layers.block(index)

    def observe(self, block: Block, linears: list[ObservedLinear]) -> list[Moments]:
        """Show all rows to a layer; returns what some of its linears saw.

        Nothing is computed past the last of them.

        Args:
            block: a layer.
            linears: of it, in their order in it.
        """
        moments = [Moments(linear.in_features, self._device) for linear in linears]
        for linear, seen in zip(linears, moments, strict=True):
            linear.moments = seen
        linears[-1].is_last_watched = True
        try:
            for rows in self._portions():
                try:
                    self._run(block, rows)
                except NothingMoreToSee:
                    continue
        finally:
            linears[-1].is_last_watched = False
            for linear in linears:
                linear.moments = None
        return moments

    def advance(self, block: Block) -> None:
        """Put all rows through a layer as it is now; the next one sees what comes out."""
        with self._stream.written(self._stream.layer + 1) as writer:
            for rows in self._portions():
                writer.write(self._run(block, rows).cpu())

    def energy(self) -> Tensor:
        """Means of squares of the stream as it is now: (num_rows, row_tokens)."""
        portions = [self._stream.read(rows) for rows in self._portions()]
        return torch.cat([rows.square().mean(-1) for rows in portions]).to(self._device)

    def _portions(self) -> Iterator[slice]:
        """Rows that go through a layer together."""
        at_once = tokens_at_once(self._row_tokens) // self._row_tokens
        for start in range(0, self._num_rows, at_once):
            yield slice(start, min(start + at_once, self._num_rows))

    def _run(self, block: Block, rows: slice) -> Tensor:
        """The stream of some rows after the layer, (tokens, hidden_size)."""
        started = time.perf_counter()
        stream = self._stream.read(rows).flatten(0, 1).to(self._device)
        try:
            return self._layers.run(block, stream)
        finally:
            self.seconds += time.perf_counter() - started
