"""Reads weights some rows at a time, so that memory never holds a whole tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.kernels.weights.weight import dense, some_rows
from appliance.model.gguf_weights import GGUFReader
from appliance.model.linear import LinearPart
from appliance.model.reader import ModelReader
from appliance.model.tensor_reader import TensorReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.quant.formats import WeightReader

PIECE_ELEMENTS = 1 << 20  # numbers read at once: 4 MiB in float32
ROW_MULTIPLE = 128  # height of the tallest block with one scale


@runtime_checkable
class ReadsRows(Protocol):
    """A `WeightReader` that can read rows of a tensor."""

    def load_rows(self, name: str, start: int, stop: int) -> Weight:
        """Read rows `start` to `stop` of a tensor."""
        ...


class WeightPieces:
    """Reads rows of one weight in float32.

    Args:
        weights: a reader that cannot read rows loads the whole tensor once.
    """

    def __init__(self, weights: WeightReader, name: str) -> None:
        self._name = name
        self._whole: Weight | None = None
        self._reader: ReadsRows | None = None
        is_packed = weights.packed_bits(name) is not None or weights.float_bits(name) is not None
        # Of packed weights only GGUF's blocks are read in rows.
        if isinstance(weights, ReadsRows) and (isinstance(weights, GGUFReader) or not is_packed):
            self._reader = weights
        else:
            self._whole = weights.load(name)

    def rows(self, rows: slice) -> Tensor:
        """Read some rows, dequantized; raise QuantizeError for NaN or infinity."""
        if self._reader is not None:
            part = self._reader.load_rows(self._name, rows.start, rows.stop)
        else:
            assert self._whole is not None
            part = some_rows(self._whole, rows, torch.float32)
        if not isinstance(part, Tensor):
            part = dense(part, torch.float32)
        elif part.dtype.itemsize < 2 or not part.dtype.is_floating_point:
            raise QuantizeError(
                f"{self._name} holds {part.dtype}; quantize the 16-bit model it was made from"
            )
        if not all_finite(part):
            raise QuantizeError(f"{self._name} holds NaN or infinity; fetch the model again")
        return part.to(torch.float32)


def all_finite(tensor: Tensor) -> bool:
    """Return True if no element is NaN or infinite: in a tenth of the time of `isfinite().all()`.

    Args:
        tensor: at least one element of a floating type, any shape.
    """
    lowest, highest = torch.aminmax(tensor)  # NaN, if there is one
    return bool(lowest.isfinite() & highest.isfinite())


def row_ranges(shape: tuple[int, ...], elements: int) -> list[slice]:
    """Split a tensor's rows into pieces of about `elements` numbers.

    Pieces are whole blocks of rows, so that each can be quantized on its own.
    """
    blocks = elements // math.prod(shape[1:]) // ROW_MULTIPLE
    rows = max(1, blocks) * ROW_MULTIPLE
    return [slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


class FloatTensors(TensorReader):
    """Reads weights in float32, piece by piece, and stacks those with one input."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        super().__init__(source, device, torch.float32, native=False)

    def dense(self, name: str) -> Tensor:
        pieces = WeightPieces(self._source.weights, name)
        return pieces.rows(slice(0, self._source.weights.shape(name)[0])).to(self._device)

    def linears(self, index: int, sources: tuple[str, ...], bias: bool) -> list[LinearPart]:
        """Read the rows of all sources as one part."""
        if not sources:
            return []
        names = [self.names.in_layer(index, source) for source in sources]
        shapes = [self._source.weights.shape(f"{name}.weight") for name in names]
        rows = sum(shape[0] for shape in shapes)
        stacked = torch.empty((rows, shapes[0][1]), dtype=torch.float32, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            for part, piece in pieces_of(self._source.weights, f"{name}.weight"):
                stacked[start + part.start : start + part.stop] = piece
            start += shape[0]
        biases = [self.dense(f"{name}.bias") for name in names] if bias else []
        return [LinearPart(stacked, torch.cat(biases) if biases else None)]


class FloatReader(ModelReader):
    """Reads layers in float32 and stacks weights with one input, without extra memory."""

    def __init__(self, source: ModelSource, device: torch.device) -> None:
        super().__init__(source, device, torch.float32)
        self._use(FloatTensors(source, device))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Look up embedding rows of (num_tokens,) int64 as the first layer gets them.

        Returns:
            (num_tokens, hidden_size) float32.
        """
        table = WeightPieces(self._source.weights, f"{self._names.embedding}.weight")
        ids, places = token_ids.unique(return_inverse=True)
        rows = torch.cat([table.rows(run) for run in _runs(ids.tolist())])[places]
        scale = torch.tensor(self._source.spec.embedding_scale, dtype=torch.float32)
        return rows if float(scale) == 1.0 else rows * scale


def pieces_of(
    weights: WeightReader, name: str, elements: int = PIECE_ELEMENTS
) -> Iterator[tuple[slice, Tensor]]:
    """Yield all rows of a weight in float32; raise QuantizeError for NaN or infinity."""
    pieces = WeightPieces(weights, name)
    for rows in row_ranges(tuple(weights.shape(name)), elements):
        yield rows, pieces.rows(rows)


def _runs(numbers: list[int]) -> Iterator[slice]:
    start = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield slice(start, previous + 1)
            start = number
        previous = number
    yield slice(start, previous + 1)
