"""Lowers the outputs' error of codes and scales together, one group of inputs after another.

The error is an exact quadratic function of the weights, so each group's best scale and minimum and
then each column's best code follow in closed form while all else stays. Zero points stay too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from appliance.quant.formats.ggml_forms import Minimum
from appliance.quant.methods.block_grids import BlockGrid, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.methods.ranges import CodeGrid

AnyGrid = TypeVar("AnyGrid", bound="BlockGrid | CodeGrid")
SWEEPS = 2
SINGULAR = 1e-6  # share of codes' spread below which scale and minimum cannot be told apart


def descend(
    weight: Tensor, grid: AnyGrid, codes: Tensor, moments: Tensor, sweeps: int = SWEEPS
) -> tuple[AnyGrid, Tensor]:
    """Return a grid and codes whose outputs' error is at most that of those given.

    Args:
        weight: (out_features, in_features) float32.
        codes: values of the grid's form, likewise.
        moments: (in_features, in_features) float32, mean of x x^T, positive on the diagonal.
    """
    size = weight.shape[1] // grid.scale.shape[1]
    scales, minima = grid.scale.clone(), grid.minimum.clone()
    codes = codes.clone()
    pull = (weight - grid.weights(codes)) @ moments  # minus half the error's slope
    for _ in range(sweeps):
        for group in range(weight.shape[1] // size):
            columns, own = slice(group * size, (group + 1) * size), slice(group, group + 1)
            inner = moments[columns, columns]
            chosen, slope = codes[:, columns], pull[:, columns].clone()
            old = scales[:, own], minima[:, own]
            before = chosen * old[0] + old[1]
            if isinstance(grid, BlockGrid):
                scale, minimum = _refitted(grid, own, old, chosen, slope, inner)
            else:
                scale, minimum = _rescaled(grid, own, old[0], chosen, slope, inner)
            now = chosen * scale + minimum
            change = now - before
            step = change @ inner
            helps = ((step * change).sum(1) < 2 * (change * slope).sum(1)).unsqueeze(1)
            scale, minimum = torch.where(helps, scale, old[0]), torch.where(helps, minimum, old[1])
            scales[:, own], minima[:, own] = scale, minimum
            now = torch.where(helps, now, before)
            slope -= torch.where(helps, step, 0.0)
            for i in range(size):
                column = slice(i, i + 1)
                wanted = now[:, column] + slope[:, column] / inner[i, i]
                if isinstance(grid, BlockGrid):
                    code = nearest(wanted, scale, minimum, grid.form)
                else:
                    code = torch.round((wanted - minimum) / scale).clamp_(0, grid.scheme.max_code)
                moved = code * scale + minimum
                slope.addmm_(moved - now[:, column], inner[i : i + 1], alpha=-1)
                chosen[:, column], now[:, column] = code, moved
            pull.addmm_(now - before, moments[columns], alpha=-1)
    found: dict[str, Any] = {"scale": scales}
    if isinstance(grid, BlockGrid):
        found["minimum"] = minima
    return replace(grid, **found), codes


def _rescaled(
    grid: CodeGrid, own: slice, scale: Tensor, codes: Tensor, slope: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the stored scale nearest to the least error for a group's codes, and its minimum."""
    zero_point = grid.zero_point[:, own]
    steps = codes - zero_point
    squares = ((steps @ inner) * steps).sum(1, keepdim=True)
    by_scale = (steps * slope).sum(1, keepdim=True)
    free = scale + torch.where(squares > 0, by_scale / squares, 0.0)
    stored = free.to(grid.dtype).float()
    stored = torch.where(stored > 0, stored, scale)
    return stored, -zero_point * stored


def _refitted(
    grid: BlockGrid,
    own: slice,
    old: tuple[Tensor, Tensor],
    codes: Tensor,
    slope: Tensor,
    inner: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the stored scale and minimum nearest to the least error for a group's codes."""
    scale, minimum = old
    weighted = codes @ inner
    squares = (weighted * codes).sum(1, keepdim=True)
    by_scale = (codes * slope).sum(1, keepdim=True)
    if grid.form.minimum is Minimum.NONE:
        free = scale + torch.where(squares > 0, by_scale / squares, 0.0)
        return grid.stored_scale(free, own), minimum
    cross = weighted.sum(1, keepdim=True)
    one, by_minimum = inner.sum(), slope.sum(1, keepdim=True)
    spread = squares * one - cross * cross
    step = (by_scale * one - cross * by_minimum) / spread
    step = torch.where(spread > SINGULAR * squares * one, step, 0.0)
    stored = grid.stored_scale(scale + step, own)
    free = minimum + (by_minimum - (stored - scale) * cross) / one
    return stored, grid.stored_minimum(free, own)
