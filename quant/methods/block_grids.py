"""Chooses the scales and minima that GGML's types store, before any code and again for given codes.

A group's free scale and minimum come from weighted least squares over several ranges; those of a
super-block's groups then become whole multiples of its own. Layouts:
`appliance.kernels.weights.ggml_types`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from appliance.quant.formats.ggml_blocks import BlockNumbers, encode_blocks
from appliance.quant.formats.ggml_forms import Minimum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.kernels.weights.packed import PackedWeight
    from appliance.quant.formats.ggml_forms import BlockScheme, GroupForm

AT_ONCE = 1 << 19  # weights whose ranges are tried together
SHARES = tuple(1.05 - step / 20 for step in range(7))  # of a group's range, to try
ANCHORS = (0.0, 0.5, 1.0)  # where a share of a range lies in it: low, in the middle, high
SMALLEST = 2.0**-24  # of float16; a super-block of zeros has it as its scale
_NUMBERS = "scale", "minimum", "unit", "minimum_unit"  # of a grid
FITS = 2  # of multiples to the codes that they give


@dataclass(frozen=True, slots=True)
class BlockGrid:
    """The weights that each group may have: code * scale + minimum.

    Codes are the type's values here, and become places among them in `pack`.

    Attributes:
        scale: (out_features, groups) float32, exactly what the stored numbers give.
        minimum: likewise; 0 without minima.
        unit: likewise, the super-block's scale, repeated; None: a group's is its own.
        minimum_unit: likewise, of the minimum.
    """

    scheme: BlockScheme
    scale: Tensor
    minimum: Tensor
    unit: Tensor | None = None
    minimum_unit: Tensor | None = None

    @property
    def form(self) -> GroupForm:
        return self.scheme.form

    def codes(self, weight: Tensor, group: int | None = None) -> Tensor:
        """Return the nearest codes, float32, of columns (out_features, n) of one group.

        Without `group` these are all columns in order.
        """
        columns, scale, minimum = beside(weight, group, self.scale, self.minimum)
        return nearest(columns, scale, minimum, self.form).reshape_as(weight)

    def weights(self, codes: Tensor, group: int | None = None) -> Tensor:
        """Return the weights of codes (out_features, n), all or of one group."""
        columns, scale, minimum = beside(codes, group, self.scale, self.minimum)
        return (columns * scale + minimum).reshape_as(codes)

    def stored_scale(self, scale: Tensor, group: slice = slice(None)) -> Tensor:
        """Round free scales (out_features, groups) to what can be stored."""
        if self.unit is None:
            return scale.half().float()
        assert self.form.multiples is not None
        unit = self.unit[:, group]
        return (scale / unit).round_().clamp_(*self.form.multiples).mul_(unit)

    def stored_minimum(self, minimum: Tensor, group: slice = slice(None)) -> Tensor:
        """Round free minima likewise."""
        if self.minimum_unit is None:
            return minimum.half().float()
        unit = self.minimum_unit[:, group]
        return (minimum / unit).round_().clamp_(-self.form.most_minimum, 0).mul_(unit)

    def pack(self, codes: Tensor) -> GgmlWeight | PackedWeight:
        """Pack codes (out_features, in_features), values of any float type."""
        values = torch.tensor(self.form.values, dtype=codes.dtype, device=codes.device)
        places = torch.searchsorted(values, codes.contiguous()).to(torch.uint8)
        return encode_blocks(self.scheme.type_name, places, self._numbers())

    def _numbers(self) -> BlockNumbers:
        has_minima = self.form.minimum is not Minimum.NONE
        if self.unit is None:
            return BlockNumbers(self.scale.half(), self.minimum.half() if has_minima else None)
        per_block = self.form.block_size // self.form.group_size
        numbers = BlockNumbers(self.unit[:, ::per_block].half(), scales=self.scale / self.unit)
        if self.minimum_unit is None:
            return numbers
        return replace(
            numbers,
            minimum=self.minimum_unit[:, ::per_block].half(),
            minima=-self.minimum / self.minimum_unit,
        )

    def cat(self, others: list[BlockGrid]) -> BlockGrid:
        """Stack grids of more rows below this one."""

        def stacked(name: str) -> Any:
            parts = [getattr(grid, name) for grid in (self, *others)]
            return None if parts[0] is None else torch.cat(parts)

        return replace(self, **{name: stacked(name) for name in _NUMBERS})


def beside(
    columns: Tensor, group: int | None, numbers: Tensor, others: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns and two numbers of each group in shapes that broadcast, without a copy.

    Args:
        columns: (out_features, n), of one group or all in order.
        group: the one; None for all.
        numbers: (out_features, groups), as are `others`.
    """
    if group is not None:
        own = slice(group, group + 1)
        return columns, numbers[:, own], others[:, own]
    grouped = columns.unflatten(1, (numbers.shape[1], -1))
    return grouped, numbers.unsqueeze(-1), others.unsqueeze(-1)


def nearest(weight: Tensor, scale: Tensor, minimum: Tensor, form: GroupForm) -> Tensor:
    """Return the values of a form that are nearest to weights; shapes broadcast."""
    steps = (weight - minimum).div_(torch.where(scale == 0, SMALLEST, scale))
    least, most = form.values[0], form.values[-1]
    if form.is_even:
        return steps.round_().clamp_(least, most)
    halves = steps.mul_(2).floor_().clamp_(2 * least, 2 * most - 1).sub_(2 * least).int()
    table = _nearest_to_halves(form, halves.device)
    return table.index_select(0, halves.flatten()).view(halves.shape)


@lru_cache
def _nearest_to_halves(form: GroupForm, device: torch.device) -> Tensor:
    """Return the values nearest to each half step from the least to the greatest value.

    All points between two neighbours lie at ends of half steps.
    """
    values = torch.tensor(form.values, dtype=torch.float32, device=device)
    steps = torch.arange(2 * form.values[0], 2 * form.values[-1], device=device)
    return values[torch.bucketize((steps + 0.5) / 2, (values[1:] + values[:-1]) / 2)]


def choose_blocks(
    weight: Tensor,
    scheme: BlockScheme,
    *,
    importance: Tensor | None = None,
    is_searched: bool = True,
) -> BlockGrid:
    """Choose the numbers of every group and super-block.

    Args:
        weight: (out_features, in_features) float32, finite; blocks divide in_features.
        importance: (in_features,) float32, what an error of each input costs; None: all equal.
        is_searched: try shares of the groups' ranges, not just all of them.
    """
    rows = max(1, AT_ONCE // weight.shape[1])
    parts = (_Search(part, scheme, importance) for part in weight.split(rows))
    first, *others = (search.run() if is_searched else search.whole() for search in parts)
    return first.cat(others)


class _Search:
    def __init__(self, weight: Tensor, scheme: BlockScheme, importance: Tensor | None) -> None:
        self._scheme, self._form = scheme, scheme.form
        size = self._form.group_size
        self._groups = weight.reshape(weight.shape[0], -1, size)
        if importance is None:
            importance = weight.new_ones(weight.shape[1])
        self._cost = importance.reshape(1, -1, size)
        self._total = self._cost.sum(-1)

    def whole(self) -> BlockGrid:
        """Return the numbers that hold every weight."""
        return self._stored(*next(self._ranges((1.0,), (0.0,))))

    def run(self) -> BlockGrid:
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for scale, minimum in self._ranges(SHARES, ANCHORS):
            best, codes = self._better(best, scale, minimum)
            best, _ = self._better(best, *self._fitted(codes, scale, minimum))
        assert best is not None, "a range at least"
        return self._stored(*best[1:])

    def _stored(self, scale: Tensor, minimum: Tensor) -> BlockGrid:
        """Return the grid of least error near free scales and minima."""
        if self._form.multiples is None:
            grid = BlockGrid(self._scheme, scale, minimum)
            return self._as_stored(grid, scale, minimum)
        found: BlockGrid | None = None
        for unit in self._units(scale):
            found = self._least(found, self._with_unit(unit, scale, minimum))
        assert found is not None, "a unit at least"
        return found

    def _ranges(
        self, shares: tuple[float, ...], anchors: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scales and minima of shares of each group's range; the first holds all of it."""
        form = self._form
        low, high = self._groups.aminmax(dim=-1)  # (rows, groups)
        if form.minimum is Minimum.NONE:
            farthest = torch.where(high > -low, high, low)
            for share in shares:
                for end in (form.values[0], form.values[-1]):
                    yield farthest * (share / end), torch.zeros_like(farthest)
            return
        if form.minimum is Minimum.MULTIPLE:
            low = low.clamp(max=0)  # stored without a sign
        span = high - low
        for share, anchor in product(shares, anchors):
            yield span * (share / form.values[-1]), low + span * ((1 - share) * anchor)

    def _error(self, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        """Return each group's weighted squared error, and its codes."""
        scale, minimum = scale.unsqueeze(-1), minimum.unsqueeze(-1)
        codes = nearest(self._groups, scale, minimum, self._form)
        lost = (codes * scale).add_(minimum).sub_(self._groups).square_().mul_(self._cost)
        return lost.sum(-1), codes

    def _better(
        self, best: tuple[Tensor, Tensor, Tensor] | None, scale: Tensor, minimum: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Keep the numbers with the smaller error in every group; return the new ones' codes."""
        if self._form.minimum is Minimum.MULTIPLE:
            minimum = minimum.clamp(max=0)
        error, codes = self._error(scale, minimum)
        if best is None:
            return (error, scale, minimum), codes
        smaller = error < best[0]
        pairs = zip((error, scale, minimum), best, strict=True)
        kept = [torch.where(smaller, new, old) for new, old in pairs]
        return (kept[0], kept[1], kept[2]), codes

    def _fitted(self, codes: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and minimum with the least error for codes."""
        weighted = codes * self._cost
        squares, product = (weighted * codes).sum(-1), (weighted * self._groups).sum(-1)
        if self._form.minimum is Minimum.NONE:
            return torch.where(squares > 0, product / squares, scale), minimum
        first, value = weighted.sum(-1), (self._cost * self._groups).sum(-1)
        spread = self._total * squares - first * first
        new_scale = (self._total * product - first * value) / spread
        new_minimum = (squares * value - first * product) / spread
        if self._form.minimum is Minimum.MULTIPLE:
            new_scale = torch.where(new_minimum > 0, product / squares, new_scale)
            new_minimum = new_minimum.clamp(max=0)
        usable = (spread > 1e-6 * self._total * squares) & (new_scale > 0)
        return torch.where(usable, new_scale, scale), torch.where(usable, new_minimum, minimum)

    def _units(self, scale: Tensor) -> list[Tensor]:
        """Return candidates of super-blocks' scales, (rows, groups)."""
        least, most = self._form.multiples or (0, 1)
        blocks = self._in_blocks(scale)
        if least == 0:
            return [self._unit(blocks.amax(-1) / most)]
        farthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
        return [self._unit(farthest / end) for end in (least, most)]

    def _with_unit(self, unit: Tensor, scale: Tensor, minimum: Tensor) -> BlockGrid:
        """Return the grid of multiples that are nearest to free numbers, fitted to its codes."""
        minimum_unit = None
        if self._form.minimum is Minimum.MULTIPLE:
            least = self._in_blocks(-minimum).amax(-1)
            minimum_unit = self._unit(least / self._form.most_minimum)
        grid = BlockGrid(self._scheme, scale, minimum, unit, minimum_unit)
        best = self._as_stored(grid, scale, minimum)
        for _ in range(FITS):
            _, codes = self._error(best.scale, best.minimum)
            fitted, _ = self._fitted(codes, best.scale, best.minimum)
            scale = best.stored_scale(fitted)
            minimum = best.minimum
            if minimum_unit is not None:
                rest = self._groups - codes * scale.unsqueeze(-1)
                minimum = (self._cost * rest).sum(-1) / self._total
            best = self._least(best, self._as_stored(grid, scale, minimum))
        return best

    def _as_stored(self, grid: BlockGrid, scale: Tensor, minimum: Tensor) -> BlockGrid:
        if self._form.minimum is not Minimum.NONE:
            minimum = grid.stored_minimum(minimum)
        return replace(grid, scale=grid.stored_scale(scale), minimum=minimum)

    def _least(self, one: BlockGrid | None, other: BlockGrid) -> BlockGrid:
        """Keep the grid with the smaller error in every super-block."""
        if one is None:
            return other
        errors = [self._error(grid.scale, grid.minimum)[0] for grid in (one, other)]
        before, after = (self._in_blocks(error).sum(-1, keepdim=True) for error in errors)
        smaller = (after < before).expand_as(self._in_blocks(errors[0])).flatten(1)

        def kept(name: str) -> Any:
            new, old = getattr(other, name), getattr(one, name)
            return None if old is None else torch.where(smaller, new, old)

        return replace(one, **{name: kept(name) for name in _NUMBERS})

    def _in_blocks(self, numbers: Tensor) -> Tensor:
        """View numbers of groups as (rows, super-blocks, groups of each)."""
        found: Tensor = numbers.unflatten(1, (-1, self._form.block_size // self._form.group_size))
        return found

    def _unit(self, of_blocks: Tensor) -> Tensor:
        """Round numbers of super-blocks to float16 and repeat them for each group."""
        unit = of_blocks.half().float()
        unit = torch.where(unit == 0, SMALLEST, unit)
        return unit.repeat_interleave(self._form.block_size // self._form.group_size, 1)
