"""Fits learned positions to a picture's grid, and says where each patch lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.model.vision.spec import Resize

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_CUBIC = -0.75  # the kernel's slope at distance 1, of OpenCV and torch


def patch_places(rows: int, columns: int, merge: int) -> NDArray[np.int64]:
    """Return row and column of each patch, (2, rows * columns): cell by cell.

    Args:
        merge: patches on a cell's side, by which rows and columns divide.
    """
    grid = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
    return np.ascontiguousarray(grid.transpose(0, 1, 3, 2, 4).reshape(2, -1))


def window_order(rows: int, columns: int, side: int) -> tuple[NDArray[np.int64], list[int]]:
    """Order a picture's cells window by window, each row by row, as the windows are.

    Args:
        rows: of cells.
        side: of a window, in cells.

    Returns:
        Numbers of the cells, (rows * columns,), and how many each window has.
    """
    cells = np.arange(rows * columns).reshape(rows, columns)
    windows = [
        cells[top : top + side, left : left + side].ravel()
        for top in range(0, rows, side)
        for left in range(0, columns, side)
    ]
    return np.concatenate(windows), [len(window) for window in windows]


def fitted(table: Floats, rows: int, columns: int, resize: Resize) -> Floats:
    """Fit a table of positions (side, side, hidden_size) to (rows, columns, hidden_size)."""
    if rows == columns == len(table):
        return table  # as every way has it
    weights = _WEIGHTS[resize]
    down, across = weights(rows, len(table)), weights(columns, len(table))
    found: Floats = np.einsum("rs,sth,ct->rch", down, table, across, optimize=True)
    return found


def _corners(count: int, side: int) -> Floats:
    places = np.linspace(0, side - 1, count, dtype=np.float32)
    return _between(places, side)


def _bilinear(count: int, side: int) -> Floats:
    return _between(_middles(count, side).clip(0, side - 1), side)


def _between(places: Floats, side: int) -> Floats:
    """Weigh the two cells around each place by how near they are."""
    far = np.abs(places[:, None] - np.arange(side, dtype=np.float32))
    weights: Floats = np.maximum(0, 1 - far)
    return weights


def _area(count: int, side: int) -> Floats:
    reach = max(np.float32(side) / np.float32(count), np.float32(1))
    far = np.abs(_middles(count, side)[:, None] - np.arange(side, dtype=np.float32))
    weights: Floats = np.maximum(0, 1 - far / reach)
    weights /= weights.sum(1, keepdims=True)
    return weights


def _bicubic(count: int, side: int) -> Floats:
    places = _middles(count, side)
    first = np.floor(places).astype(int)
    weights = np.zeros((count, side), np.float32)
    for step in range(-1, 3):
        far = np.abs(places - (first + step))
        near = ((_CUBIC + 2) * far - (_CUBIC + 3)) * far * far + 1
        rest = ((far - 5) * far + 8) * far - 4
        cells = (first + step).clip(0, side - 1)
        np.add.at(weights, (np.arange(count), cells), np.where(far <= 1, near, _CUBIC * rest))
    return weights


def _middles(count: int, side: int) -> Floats:
    scale = np.float32(side) / np.float32(count)
    return (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)


def _nearest(count: int, side: int) -> Floats:
    shares = (np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count))).clip(
        max=np.float32(1 - 1e-6)
    )
    ends = (1 / side + np.arange(side - 1) / side).astype(np.float32)
    return np.eye(side, dtype=np.float32)[np.searchsorted(ends, shares, side="right")]


_WEIGHTS: dict[Resize, Callable[[int, int], Floats]] = {
    Resize.CORNERS: _corners,
    Resize.AREA: _area,
    Resize.BILINEAR: _bilinear,
    Resize.BICUBIC: _bicubic,
    Resize.NEAREST: _nearest,
}
