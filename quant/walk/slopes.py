"""Measures how much the outputs of a model's linears matter to its answers.

Rows of text pass through the model as it is, and the slopes of its answers come back through it,
layer by layer, so that memory holds one layer. From each answer a token is drawn; the mean square
of the slope of its log likelihood by an output is what an error of that output adds to the answers'
divergence (Fisher's information; for weights: GuidedQuant, arXiv:2505.07004).
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file

from appliance.kernels.backend import select_backend
from appliance.model_files.checkpoint import write_safetensors
from appliance.quant.walk.block import observing
from appliance.quant.walk.pieces import pieces_of
from appliance.quant.walk.places import is_plain, row_places
from appliance.quant.walk.row_layers import RowLayers
from appliance.quant.walk.stream import ResidualStream, stream_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.quant.walk.block import TransformerBlock

TOKENS, ROW_TOKENS = 4096, 256  # that slopes are measured on; a row's results are in memory
FILE = "slopes.safetensors"
SEED = 11  # of the tokens that are drawn


def measured_rows(rows: Tensor) -> Tensor:
    """Return the start of the first calibration rows, of which slopes are measured."""
    some = rows[:, :ROW_TOKENS]
    return some[: max(1, TOKENS // some.shape[1])].contiguous()


def slope_bytes(spec: DecoderSpec, rows: Tensor) -> int:
    """Return the bytes of files of `Slopes`: a stream per layer, and slopes before and after."""
    return (len(spec.layers) + 3) * stream_bytes(rows, spec.hidden_size)


def kept_mean_squares(
    source: ModelSource, rows: Tensor, state: Path, device: torch.device
) -> dict[str, Tensor]:
    """Return those of an earlier run, or measure `Slopes.mean_squares` and keep them.

    Empty for models with other layers than plain ones, or with a head that is more than a matrix.

    Args:
        rows: of the calibration; the first ones are used.
        state: folder of this run's state.

    Raises:
        CheckpointError: the file cannot be written.
    """
    spec, path = source.spec, state / FILE
    if not all(map(is_plain, spec.layers)) or spec.embedding_width or spec.head_norm:
        return {}
    if path.exists():
        return load_file(path)
    found = Slopes(source, measured_rows(rows), state / "slopes", device).mean_squares()
    write_safetensors(path, found)
    return found


class Slopes:
    """Passes rows through a model and slopes back; all layers are plain, see `places.is_plain`.

    Args:
        rows: (num_rows, row_tokens) int64.
        folder: for streams and slopes, see `slope_bytes`; created.
    """

    def __init__(
        self, source: ModelSource, rows: Tensor, folder: Path, device: torch.device
    ) -> None:
        self._source = source
        self._rows = rows
        self._folder = folder
        self._device = device
        self._backend = observing(select_backend(device, "reference"))  # which torch can derive
        self._layers = RowLayers(source, rows.shape[1], self._backend, device)
        shutil.rmtree(folder, ignore_errors=True)
        depth = len(source.spec.layers)
        self._streams = [self._file(str(index), 0) for index in range(depth + 1)]
        self._slopes = self._file("slopes", depth)

    def mean_squares(self) -> dict[str, Tensor]:
        """Return the slopes' mean squares: (out_features,) float32 by name of a linear's weight."""
        self._forward()
        with self._slopes.written(self._slopes.layer) as writer:
            for slope in self._of_answers():
                writer.write(slope)
        found: dict[str, Tensor] = {}
        for index in reversed(range(len(self._source.spec.layers))):
            block = self._layers.block(index)
            for linear in block.linears():
                linear.slopes = torch.zeros(linear.out_features, device=self._device)
            self._back(index, block)
            stored = self._source.family.names.linears(index)
            places = row_places(self._source, index)
            for linear, names, place in zip(block.linears(), stored, places, strict=True):
                assert linear.slopes is not None
                sizes = [self._source.weights.shape(name)[0] for name in names]
                slopes = (linear.slopes / self._rows.numel()).cpu()
                parts = (slopes if place is None else slopes[place]).split(sizes)
                found |= dict(zip(names, parts, strict=True))
        shutil.rmtree(self._folder)
        return found

    def _file(self, name: str, layer: int) -> ResidualStream:
        folder = self._folder / name
        folder.mkdir(parents=True)
        count, tokens = self._rows.shape
        return ResidualStream(folder, count, tokens, self._source.spec.hidden_size, layer)

    def _portions(self) -> Iterator[slice]:
        count = len(self._rows)
        at_once = max(1, ROW_TOKENS // self._rows.shape[1])
        for start in range(0, count, at_once):
            yield slice(start, min(start + at_once, count))

    def _forward(self) -> None:
        with self._streams[0].written(0) as writer:
            for rows in self._portions():
                writer.write(self._layers.reader.embed(self._rows[rows].flatten()))
        for index, stream in enumerate(self._streams[:-1]):
            block = self._layers.block(index)
            with self._streams[index + 1].written(0) as writer:
                for rows in self._portions():
                    writer.write(self._layers.run(block, self._read(stream, rows)).cpu())

    def _read(self, stream: ResidualStream, rows: slice) -> Tensor:
        return stream.read(rows).flatten(0, 1).to(self._device)

    def _of_answers(self) -> Iterator[Tensor]:
        """Yield the slopes by the last stream, portion by portion."""
        norm = self._layers.reader.first_norm(len(self._source.spec.layers))
        assert norm is not None, "refused before"
        drawn = torch.Generator(self._device).manual_seed(SEED)
        for rows in self._portions():
            stream = self._read(self._streams[-1], rows).requires_grad_()
            hidden = norm.of(stream, self._backend)
            hidden.backward(self._of_hidden(hidden.detach(), drawn))
            assert stream.grad is not None
            yield stream.grad.cpu()

    def _of_hidden(self, hidden: Tensor, drawn: torch.Generator) -> Tensor:
        """Draw a token from each answer; return the slope of its log likelihood by `hidden`.

        The head is read in pieces, so that memory holds neither it nor the logits.
        """
        spec, names = self._source.spec, self._source.family.names
        bias = self._layers.reader.head_bias()
        name = names.embedding if spec.tied_head else names.head
        mean = torch.zeros_like(hidden)  # of rows of the head, not divided by `total` yet
        total, largest, luckiest = hidden.new_zeros(3, len(hidden), 1)
        largest.fill_(-torch.inf)
        luckiest.fill_(-torch.inf)
        chosen = torch.zeros_like(hidden)
        for where, piece in pieces_of(self._source.weights, f"{name}.weight"):
            matrix = piece.to(self._device)
            logits = hidden @ matrix.T
            logits = (logits if bias is None else logits + bias[where]) * spec.logit_scale
            rise = torch.full_like(logits, spec.logit_scale)  # of the logit by the product
            if spec.logit_softcap is not None:
                logits = self._backend.soft_cap(logits, spec.logit_softcap)
                rise *= 1 - (logits / spec.logit_softcap).square()
            # The largest of logits and Gumbel's noise is a token drawn from the softmax.
            noise = torch.empty_like(logits).exponential_(generator=drawn).log_()
            luck, place = (logits - noise).max(1, keepdim=True)
            found = matrix[place.squeeze(1)] * rise.gather(1, place)
            chosen = torch.where(luck > luckiest, found, chosen)
            luckiest = torch.maximum(luck, luckiest)
            top = torch.maximum(largest, logits.amax(1, keepdim=True))
            shrunk, weights = (largest - top).exp(), (logits - top).exp()
            mean = mean * shrunk + (weights * rise) @ matrix
            total = total * shrunk + weights.sum(1, keepdim=True)
            largest = top
        slope: Tensor = chosen - mean / total
        return slope

    def _back(self, index: int, block: TransformerBlock) -> None:
        """Pass the slopes back through a layer, whose linears collect theirs."""
        with self._slopes.written(index) as writer:
            for rows in self._portions():
                stream = self._read(self._streams[index], rows).requires_grad_()
                self._layers.run(block, stream).backward(self._read(self._slopes, rows))
                assert stream.grad is not None
                writer.write(stream.grad.cpu())
