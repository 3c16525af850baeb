"""Chooses the scales and minima of GGML's K types, whole multiples of a super-block's own.

The grid is chosen before any code, so that GPTQ and AWQ round to it and their codes are stored as
they are. Layouts: `appliance.kernels.weights.ggml_types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.weights.ggml_types import SUPERBLOCK
from appliance.quant.formats.ggml_blocks import SuperBlocks, encode_super_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.quant.formats.scheme import SuperBlockScheme

MOST_UNSIGNED = 63  # largest scale and minimum of six bits in Q4_K
MOST_SIGNED = 127  # largest scale of Q6_K, of either sign


@dataclass(frozen=True, slots=True)
class SuperBlockGrid:
    """The grid that each group's weights are rounded to: w = code * scale + offset.

    Attributes:
        parts: the numbers that are stored.
        scale: (out_features, groups) float32, exactly what the stored numbers give.
        offset: likewise.
    """

    scheme: SuperBlockScheme
    parts: SuperBlocks
    scale: Tensor
    offset: Tensor

    @classmethod
    def of(cls, scheme: SuperBlockScheme, parts: SuperBlocks) -> SuperBlockGrid:
        per_block = SUPERBLOCK // scheme.group_size
        scale = parts.step.float().repeat_interleave(per_block, 1) * parts.scales
        if scheme.symmetric:
            return cls(scheme, parts, scale, -(1 << (scheme.bits - 1)) * scale)
        least = parts.min_step.float().repeat_interleave(per_block, 1) * parts.minima
        return cls(scheme, parts, scale, -least)

    def codes(self, weight: Tensor, group: int | None = None) -> Tensor:
        """Return the nearest codes, float32, of columns (out_features, n) of one group.

        Without `group` these are all columns in order.
        """
        columns, scale, offset = beside(weight, group, self.scale, self.offset)
        return _nearest(columns, scale, offset, self.scheme).reshape_as(weight)

    def weights(self, codes: Tensor, group: int | None = None) -> Tensor:
        """Return the weights of codes (out_features, n), all or of one group."""
        columns, scale, offset = beside(codes, group, self.scale, self.offset)
        return (columns * scale + offset).reshape_as(codes)

    def pack(self, codes: Tensor) -> GgmlWeight:
        """Pack codes (out_features, in_features), whole numbers of any float type."""
        return encode_super_blocks(self.scheme.type_name, codes.to(torch.uint8), self.parts)


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


def choose_super_blocks(
    weight: Tensor,
    scheme: SuperBlockScheme,
    *,
    importance: Tensor | None = None,
    shares: tuple[float, ...],
) -> SuperBlockGrid:
    """Choose the numbers of every super-block.

    Each share of the groups' ranges is tried with free scales, which least squares then fit to the
    codes; the largest give the super-block its own. Then each is tried as multiples of these. A
    super-block for which that is no better keeps the multiples that whole ranges give, so the
    weighted error never exceeds theirs.

    Args:
        weight: (out_features, in_features) float32, finite; super-blocks divide in_features.
        importance: (in_features,) float32, mean square of each input; None: all equal.
        shares: shares of a group's range to try.
    """
    search = _Search(weight, scheme, importance)
    plain, plain_error = search.run((1.0,))
    if len(shares) == 1:
        return SuperBlockGrid.of(scheme, plain)
    found, error = search.run(shares)
    better = error < plain_error  # (out_features, super-blocks)
    groups = better.repeat_interleave(SUPERBLOCK // scheme.group_size, 1)
    chosen = SuperBlocks(
        step=torch.where(better, found.step, plain.step),
        min_step=torch.where(better, found.min_step, plain.min_step),
        scales=torch.where(groups, found.scales, plain.scales),
        minima=torch.where(groups, found.minima, plain.minima),
    )
    return SuperBlockGrid.of(scheme, chosen)


class _Search:
    def __init__(self, weight: Tensor, scheme: SuperBlockScheme, importance: Tensor | None) -> None:
        size = scheme.group_size
        self._scheme = scheme
        self._groups = weight.reshape(weight.shape[0], -1, size)
        self._matters = None if importance is None else importance.reshape(1, -1, size)
        low, high = self._groups.aminmax(dim=-1)  # (out_features, groups)
        self._low, self._high = low, high
        if not scheme.symmetric:
            self._low = low.clamp(max=0)  # a minimum is stored without a sign

    def run(self, shares: tuple[float, ...]) -> tuple[SuperBlocks, Tensor]:
        """Return the numbers, and the errors of super-blocks, (out_features, super-blocks)."""
        scale, low = self._best([self._range(share) for share in shares])
        if len(shares) > 1:
            scale, low = self._best([(scale, low), self._refitted(scale, low)])
        step = self._step(scale.abs(), MOST_SIGNED if self._scheme.symmetric else MOST_UNSIGNED)
        min_step = self._step(-low, MOST_UNSIGNED)
        best: tuple[Tensor, Tensor, Tensor] | None = None  # error, scales, minima
        for free in [(scale, low), *(self._range(share) for share in shares)]:
            parts = self._multiples(*free, step, min_step)
            grid = SuperBlockGrid.of(self._scheme, parts)
            best = _better(best, (self._error(grid.scale, grid.offset), parts.scales, parts.minima))
        assert best is not None, "a range at least"
        error, scales, minima = best
        blocks = error.unflatten(1, (-1, SUPERBLOCK // self._scheme.group_size)).sum(-1)
        return SuperBlocks(step, min_step, scales, minima), blocks

    def _range(self, share: float) -> tuple[Tensor, Tensor]:
        """Return the scale and the lowest weight of a share of each group's range."""
        low, high = self._low * share, self._high * share
        if not self._scheme.symmetric:
            return (high - low) / self._scheme.max_code, low
        # As in `rtn.quantize`, the farthest weight gets the lowest code.
        scale = -torch.where(high > -low, high, low) / (1 << (self._scheme.bits - 1))
        return scale, torch.zeros_like(scale)

    def _best(self, ranges: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for scale, low in ranges:
            best = _better(best, (self._error(scale, self._offset(scale, low)), scale, low))
        assert best is not None, "a range at least"
        return best[1], best[2]

    def _offset(self, scale: Tensor, low: Tensor) -> Tensor:
        return -(1 << (self._scheme.bits - 1)) * scale if self._scheme.symmetric else low

    def _refitted(self, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale and lowest weight with the least error for the codes of these."""
        values, matters = self._groups, self._matters
        offset = self._offset(scale, low).unsqueeze(-1)
        codes = _nearest(values, scale.unsqueeze(-1), offset, self._scheme)
        if self._scheme.symmetric:
            codes -= 1 << (self._scheme.bits - 1)
        weighted = codes if matters is None else codes * matters
        if self._scheme.symmetric:
            squares = (weighted * codes).sum(-1)
            return torch.where(squares > 0, (weighted * values).sum(-1) / squares, scale), low
        total = torch.ones_like(values) if matters is None else matters.expand_as(values)
        one, first, second = total.sum(-1), weighted.sum(-1), (weighted * codes).sum(-1)
        value, product = (total * values).sum(-1), (weighted * values).sum(-1)
        spread = one * second - first * first
        new_scale = (one * product - first * value) / spread
        new_low = (second * value - first * product) / spread
        usable = (spread > 0) & (new_scale > 0) & (new_low <= 0)
        return torch.where(usable, new_scale, scale), torch.where(usable, new_low, low)

    def _step(self, largest: Tensor, most: int) -> Tensor:
        """Return a super-block's own scale, (out_features, super-blocks) float16."""
        per_block = SUPERBLOCK // self._scheme.group_size
        of_blocks: Tensor = largest.unflatten(1, (-1, per_block)).amax(-1)
        return (of_blocks / most).half()

    def _multiples(self, scale: Tensor, low: Tensor, step: Tensor, min_step: Tensor) -> SuperBlocks:
        per_block = SUPERBLOCK // self._scheme.group_size

        def whole(free: Tensor, unit: Tensor, least: int, most: int) -> Tensor:
            units = unit.float().repeat_interleave(per_block, 1)
            return (free / torch.where(units == 0, 1.0, units)).round().clamp_(least, most)

        if self._scheme.symmetric:
            scales = whole(scale, step, -MOST_SIGNED, MOST_SIGNED)
        else:
            scales = whole(scale, step, 0, MOST_UNSIGNED)
        return SuperBlocks(step, min_step, scales, whole(-low, min_step, 0, MOST_UNSIGNED))

    def _error(self, scale: Tensor, offset: Tensor) -> Tensor:
        """Return the weighted squared error of each group."""
        scale, offset = scale.unsqueeze(-1), offset.unsqueeze(-1)
        lost = _nearest(self._groups, scale, offset, self._scheme).mul_(scale)
        lost = lost.add_(offset).sub_(self._groups).square_()
        return (lost if self._matters is None else lost.mul_(self._matters)).sum(-1)


def _nearest(weight: Tensor, scale: Tensor, offset: Tensor, scheme: SuperBlockScheme) -> Tensor:
    codes = (weight - offset).div_(torch.where(scale == 0, 1.0, scale))
    return codes.round_().clamp_(0, scheme.max_code)


def _better(
    best: tuple[Tensor, Tensor, Tensor] | None, other: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep the candidate with the smaller error, its first part, in every group."""
    if best is None:
        return other
    smaller = other[0] < best[0]
    error, scale, low = (
        torch.where(smaller, new, old) for new, old in zip(other, best, strict=True)
    )
    return error, scale, low
