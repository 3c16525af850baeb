"""Keeps the rows that a layer's experts read, so that memory needs to hold one expert.

A first pass of text through the layer writes each row and the router's choice; then every expert
reads the rows that chose it and adds its output to their sums, for a last pass to read. The files
have no names and vanish when they are closed.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import torch

from appliance.model.experts import summed
from appliance.quant.walk.block import observe_calls
from appliance.quant.walk.stream import FLOAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.operations import ChosenExperts, Shared
    from appliance.model.layers import MLP
    from appliance.quant.walk.block import Moments, ObservedLinear

ROWS_AT_ONCE = 512  # of an expert
ROUTE_BYTES = 9  # of a choice: number, weight, and a comparison


class RoutedRows:
    """Rows of text with the experts that their router chose.

    Args:
        folder: for 8 bytes per token and hidden element.
        num_tokens: of all text.
        weighs_inputs: see `ExpertsSpec`.

    Raises:
        OSError: the disk has no space.
    """

    def __init__(
        self,
        folder: Path,
        num_tokens: int,
        width: int,
        device: torch.device,
        *,
        weighs_inputs: bool = False,
    ) -> None:
        self._device = device
        self._weighs_inputs = weighs_inputs
        self._num_tokens = num_tokens
        self._ids = torch.empty(0)
        self._weights = torch.empty(0)
        self._inputs = _RowFile(folder / "expert-inputs", num_tokens, width)
        try:
            self._sums = _RowFile(folder / "expert-sums", num_tokens, width)
        except OSError:
            self._inputs.close()
            raise

    def close(self) -> None:
        self._inputs.close()
        self._sums.close()

    def keeper(self) -> RowsElsewhere:
        """Return experts that keep all rows, portion by portion, and add nothing to them."""
        return RowsElsewhere(self._keep)

    def summed(self) -> RowsElsewhere:
        """Return experts that answer with the sums, portion by portion."""
        return RowsElsewhere(lambda tokens, *_: self._sums.read(tokens).to(self._device))

    def is_chosen(self, expert: int) -> bool:
        return bool((self._ids == expert).any())

    def observe(self, expert: int, mlp: MLP, linear: ObservedLinear) -> Moments:
        """Run an expert on its rows up to one of its linears; return that one's moments."""
        calls: Iterator[Callable[[], object]] = (
            partial(mlp, rows) for _, rows, _ in self._portions(expert)
        )
        (moments,) = observe_calls([linear], self._device, calls)
        return moments

    def add(self, expert: int, mlp: MLP) -> None:
        """Add an expert's outputs, times the router's weights, to the sums of its rows."""
        for tokens, rows, weights in self._portions(expert):
            added = mlp(rows).float() * weights
            self._sums.write(tokens, self._sums.read(tokens) + added.cpu())

    def _portions(self, expert: int) -> Iterator[tuple[list[int], Tensor, Tensor | float]]:
        """Yield an expert's tokens, the rows that it reads and the weights of what it says."""
        tokens, places = torch.where(self._ids == expert)
        for some, at in zip(tokens.split(ROWS_AT_ONCE), places.split(ROWS_AT_ONCE), strict=True):
            rows = self._inputs.read(some.tolist()).to(self._device)
            weights = self._weights[some, at].to(self._device).unsqueeze(1)
            if self._weighs_inputs:
                yield some.tolist(), rows * weights, 1.0
            else:
                yield some.tolist(), rows, weights

    def _keep(self, tokens: range, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if not len(self._ids):
            shape = self._num_tokens, ids.shape[1]
            self._ids = torch.empty(shape, dtype=torch.int32)
            self._weights = torch.empty(shape)
        rows = slice(tokens.start, tokens.stop)
        self._ids[rows], self._weights[rows] = ids, weights
        self._inputs.write(tokens, hidden.cpu())
        return torch.zeros_like(hidden, dtype=FLOAT)


class RowsElsewhere:
    """`kernels.operations.RoutedMLPs` of a layer whose experts run elsewhere.

    Args:
        answer: maps the numbers of tokens, their rows, experts and weights to the experts' sums;
            calls get the tokens in order.
    """

    nbytes = 0
    weighs_inputs = True  # it is given rows as they are
    timed = None

    def __init__(self, answer: Callable[[range, Tensor, Tensor, Tensor], Tensor]) -> None:
        self._answer = answer
        self._next = 0

    def __call__(
        self, hidden: Tensor, choice: ChosenExperts, shared: Shared | None = None
    ) -> Tensor:
        """(num_tokens, hidden_size) -> the same shape and type."""
        tokens = range(self._next, self._next + len(hidden))
        self._next = tokens.stop
        sums = self._answer(tokens, hidden, choice.ids, choice.weights)
        return summed(sums, shared, hidden.dtype)


def nothing_yet() -> RowsElsewhere:
    """Return the experts of a layer that ends before them."""

    def answer(*_: object) -> Tensor:
        raise AssertionError("the layer did not end before its experts")

    return RowsElsewhere(answer)


class _RowFile:
    """Rows (width,) float32, all 0 at first."""

    def __init__(self, path: Path, num_rows: int, width: int) -> None:
        self._width = width
        self._row_bytes = width * FLOAT.itemsize
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        path.unlink()
        try:
            os.posix_fallocate(self._file, 0, num_rows * self._row_bytes)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._file)

    def read(self, rows: Sequence[int]) -> Tensor:
        """Return rows, (len(rows), width)."""
        found = torch.empty((len(rows), self._width), dtype=FLOAT)
        for row, into in zip(rows, found.numpy(), strict=True):
            read = os.preadv(self._file, [into], row * self._row_bytes)
            assert read == self._row_bytes, (row, read)
        return found

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """Write values (len(rows), width)."""
        for row, value in zip(rows, values.contiguous().numpy(), strict=True):
            written = os.pwrite(self._file, value, row * self._row_bytes)
            assert written == self._row_bytes, (row, written)
