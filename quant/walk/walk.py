"""Runs calibration rows through a model with one layer in memory, the rest on disk.

Results do not depend on memory: rows always pass through a layer in the same portions.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from appliance.kernels.backend import select_backend
from appliance.quant.walk.block import AllInputsSeen, Moments, observing
from appliance.quant.walk.row_layers import RowLayers
from appliance.quant.walk.stream import ResidualStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.packed import PackedWeight
    from appliance.model.source import ModelSource
    from appliance.quant.kv.attention_watch import AttentionWatch
    from appliance.quant.walk.block import ObservedLinear, TransformerBlock

TOKENS_AT_ONCE = 512  # in whole rows; a longer row passes alone


def tokens_at_once(row_tokens: int) -> int:
    """Return the tokens that pass through a layer together: the rows that fit, or one row."""
    return max(1, TOKENS_AT_ONCE // row_tokens) * row_tokens


class Walk:
    """Runs calibration rows through a model, layer by layer.

    Args:
        rows: (num_rows, row_tokens) int64.
        folder: for the residual stream, 4 bytes per token and hidden element, twice while it
            advances; created if missing.
        layer: the layer that the rows have reached; unless it is 0, the folder holds its stream.
        watch: records every layer's attention, for `kv`.

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
        # GPU kernels have no float32 cache; torch's are fast on whole rows.
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

    def block(self, index: int) -> TransformerBlock:
        return self._layers.block(index)

    def layer(self, index: int, others: Mapping[str, PackedWeight]) -> TransformerBlock:
        """Read a layer of any kind, with `others` in place of some of its weights."""
        return self._layers.block(index, others)

    def observe(
        self, block: TransformerBlock, linears: list[ObservedLinear], *, to_end: bool = False
    ) -> list[Moments]:
        """Run all rows through a layer; return the moments of some linears' inputs.

        It stops after the last of these linears unless `to_end`: if rows choose experts, a linear
        may get none of some rows.
        """
        moments = [Moments(linear.in_features, self._device) for linear in linears]
        for linear, seen in zip(linears, moments, strict=True):
            linear.moments = seen
        linears[-1].is_last_watched = not to_end
        try:
            for rows in self._portions():
                try:
                    self._run(block, rows)
                except AllInputsSeen:
                    continue
        finally:
            linears[-1].is_last_watched = False
            for linear in linears:
                linear.moments = None
        return moments

    def advance(self, block: TransformerBlock) -> None:
        """Run all rows through a layer as it is now, for the next layer."""
        with self._stream.written(self._stream.layer + 1) as writer:
            for rows in self._portions():
                writer.write(self._run(block, rows).cpu())

    def energy(self) -> Tensor:
        """Return the mean squares of the current stream, (num_rows, row_tokens)."""
        portions = [self._stream.read(rows) for rows in self._portions()]
        return torch.cat([rows.square().mean(-1) for rows in portions]).to(self._device)

    def _portions(self) -> Iterator[slice]:
        at_once = tokens_at_once(self._row_tokens) // self._row_tokens
        for start in range(0, self._num_rows, at_once):
            yield slice(start, min(start + at_once, self._num_rows))

    def _run(self, block: TransformerBlock, rows: slice) -> Tensor:
        """Return the stream of some rows after the layer, (tokens, hidden_size)."""
        started = time.perf_counter()
        stream = self._stream.read(rows).flatten(0, 1).to(self._device)
        try:
            return self._layers.run(block, stream)
        finally:
            self.seconds += time.perf_counter() - started
