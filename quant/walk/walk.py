"""Runs calibration rows through a model with one layer in memory, the rest on disk.

Results do not depend on memory: rows always pass through a layer in the same portions.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from appliance.kernels.backend import select_backend
from appliance.model.spec import ExpertsSpec
from appliance.quant.walk.block import observe_calls, observing
from appliance.quant.walk.routed_rows import RoutedRows, nothing_yet
from appliance.quant.walk.row_layers import RowLayers
from appliance.quant.walk.stream import ResidualStream, stream_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.weights.weight import CodedWeight
    from appliance.model.layers import MLP
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.quant.kv.attention import AttentionWatch
    from appliance.quant.walk.block import Moments, ObservedLinear, TransformerBlock
    from appliance.quant.walk.routed_rows import RowsElsewhere

TOKENS_AT_ONCE = 512  # in whole rows; a longer row passes alone


def tokens_at_once(row_tokens: int) -> int:
    """Return the tokens that pass through a layer together: the rows that fit, or one row."""
    return max(1, TOKENS_AT_ONCE // row_tokens) * row_tokens


def disk_bytes(spec: DecoderSpec, rows: Tensor) -> int:
    """Return the bytes of files of a walk: two streams, and what experts read and say."""
    return (4 if spec.has_experts else 2) * stream_bytes(rows, spec.hidden_size)


class Walk:
    """Runs calibration rows through a model, layer by layer.

    Args:
        rows: (num_rows, row_tokens) int64.
        folder: for the residual stream and experts' rows, see `disk_bytes`; created if missing.
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
        self._folder = folder
        self._spec = source.spec
        self._num_rows, self._row_tokens = rows.shape
        # GPU kernels have no float32 cache; torch's are fast on whole rows.
        choice = "reference" if device.type == "cuda" else "auto"
        backend = observing(select_backend(device, choice))
        if watch is not None:
            backend = watch.on(backend)
        self._layers = RowLayers(source, self._row_tokens, backend, device)
        folder.mkdir(exist_ok=True)
        self._stream = ResidualStream(
            folder, self._num_rows, self._row_tokens, self._spec.hidden_size, layer
        )
        if not self._stream.exists:
            assert layer == 0, f"the stream before layer {layer} is not in {folder}"
            with self._stream.written(0) as writer:
                for portion in self.portions():
                    embedded = self._layers.reader.embed(rows[portion].flatten())
                    writer.write(embedded)

    def block(self, index: int) -> TransformerBlock:
        return self._layers.block(index)

    def layer(
        self,
        index: int,
        others: Mapping[str, CodedWeight],
        experts: RowsElsewhere | None = None,
    ) -> TransformerBlock:
        """Read a layer of any kind without its routed experts.

        Args:
            others: replace some of its weights.
            experts: answer for the routed ones; without, the layer must end before them.
        """
        return self._layers.block(index, others, experts or nothing_yet())

    def expert(self, index: int, number: int, others: Mapping[str, CodedWeight]) -> MLP:
        """Read one expert of a layer, with `others` in place of some of its weights."""
        return self._layers.expert(index, number, others)

    @contextmanager
    def routed(self, index: int, others: Mapping[str, CodedWeight]) -> Iterator[RoutedRows]:
        """Run all rows through a layer up to its routed experts; give what these read."""
        count, mlp = self._num_rows * self._row_tokens, self._spec.layers[index].mlp
        assert isinstance(mlp, ExpertsSpec)
        width = mlp.latent or self._spec.hidden_size
        rows = RoutedRows(self._folder, count, width, self._device, weighs_inputs=mlp.weighs_inputs)
        with closing(rows) as kept:
            self._pass(self.layer(index, others, kept.keeper()))
            yield kept

    @contextmanager
    def whole(self, index: int) -> Iterator[TransformerBlock]:
        """Give an unchanged layer for one pass of all rows; its routed experts ran before.

        That took a pass of its own through the rest of the layer.
        """
        mlp = self._spec.layers[index].mlp
        if not isinstance(mlp, ExpertsSpec):
            yield self.block(index)
            return
        with self.routed(index, {}) as kept:
            for number in filter(kept.is_chosen, mlp.experts):
                kept.add(number, self.expert(index, number, {}))
            yield self.layer(index, {}, kept.summed())

    def observe(self, block: TransformerBlock, linears: list[ObservedLinear]) -> list[Moments]:
        """Run all rows through a layer up to the last of some linears; return their moments."""
        calls = (partial(self.run, block, rows) for rows in self.portions())
        return observe_calls(linears, self._device, calls)

    def advance(self, block: TransformerBlock) -> None:
        """Run all rows through a layer as it is now, for the next layer."""
        with self._stream.written(self._stream.layer + 1) as writer:
            for rows in self.portions():
                writer.write(self.run(block, rows).cpu())

    def _pass(self, block: TransformerBlock) -> None:
        for rows in self.portions():
            self.run(block, rows)

    def energy(self) -> Tensor:
        """Return the mean squares of the current stream, (num_rows, row_tokens)."""
        portions = [self._stream.read(rows) for rows in self.portions()]
        return torch.cat([rows.square().mean(-1) for rows in portions]).to(self._device)

    def portions(self) -> Iterator[slice]:
        """Cut the rows into those that run together."""
        at_once = tokens_at_once(self._row_tokens) // self._row_tokens
        for start in range(0, self._num_rows, at_once):
            yield slice(start, min(start + at_once, self._num_rows))

    def run(self, block: TransformerBlock, rows: slice) -> Tensor:
        """Return the stream of some rows after the layer, (tokens, hidden_size)."""
        started = time.perf_counter()
        stream = self._stream.read(rows).flatten(0, 1).to(self._device)
        try:
            return self._layers.run(block, stream)
        finally:
            self.seconds += time.perf_counter() - started
