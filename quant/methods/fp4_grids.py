"""Chooses the scales of groups of 4-bit floats, MXFP4's and NVFP4's.

The number formats belong to OCP (Microscaling Formats, v1.0) and NVIDIA.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from appliance.kernels.weights.fp4 import VALUES, Fp4Weight
from appliance.kernels.weights.fp8 import E4M3_MAX
from appliance.quant.formats.pack import pack_codes
from appliance.quant.methods.block_grids import beside

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import Fp4Scheme

LARGEST = VALUES[-1]
SIGN = 8  # of a code
BIAS, LEAST_POWER, MOST_POWER = 127, -127, 127  # of e8m0, whose last code is NaN
SMALLEST_SCALE = 2.0**-9  # of e4m3
# Factors on the scale that maps a group's largest weight to the largest value: the values lie far
# apart there, so that another place for it may lose less.
AROUND_LARGEST = tuple(2 ** (step / 8) for step in range(-3, 6))
_BETWEEN = tuple((low + high) / 2 for low, high in pairwise(VALUES))


@dataclass(frozen=True, slots=True)
class Fp4Grid:
    """The weights that each group may have: value * scale * whole.

    Attributes:
        scale: (out_features, groups) float32, exact in its stored type.
        whole: () float32, a factor of all weights, the reciprocal of the stored divisor.
    """

    scheme: Fp4Scheme
    scale: Tensor
    whole: Tensor

    def codes(self, weight: Tensor, group: int | None = None) -> Tensor:
        """Return the nearest codes, float32, of columns (out_features, n) of one group, or all."""
        factor = self.scale * self.whole
        columns, factor, _ = beside(weight, group, factor, factor)
        return nearest(columns / factor).reshape_as(weight)

    def weights(self, codes: Tensor, group: int | None = None) -> Tensor:
        """Return the weights of codes (out_features, n), all or of one group."""
        factor = self.scale * self.whole
        columns, factor, _ = beside(codes, group, factor, factor)
        return (values_of(columns) * factor).reshape_as(codes)

    def pack(self, codes: Tensor) -> Fp4Weight:
        """Pack codes (out_features, in_features), whole numbers of any float type."""
        rows = codes.shape[0]
        if self.scheme.has_powers:
            stored = (torch.log2(self.scale) + BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
        else:
            stored = self.scale.to(torch.float8_e4m3fn)
        whole = self.whole.expand(rows).contiguous()
        return Fp4Weight(pack_codes(codes.to(torch.uint8), 4), stored, whole)


def nearest(values: Tensor) -> Tensor:
    """Return the codes, float32, of the values of e2m1 that are nearest."""
    limits = torch.tensor(_BETWEEN, device=values.device)
    codes = torch.bucketize(values.abs(), limits, out_int32=True).float()
    return codes + SIGN * (values < 0)


def values_of(codes: Tensor) -> Tensor:
    table = torch.tensor((*VALUES, *(-value for value in VALUES)), device=codes.device)
    return table[codes.long()]


def choose_floats(
    weight: Tensor,
    scheme: Fp4Scheme,
    *,
    importance: Tensor | None = None,
    is_searched: bool = True,
) -> Fp4Grid:
    """Choose the scale of every group, with the least weighted error of those tried.

    Args:
        weight: (out_features, in_features) float32, finite.
        importance: (in_features,) float32, mean square of each input; None: all equal.
        is_searched: try other scales than the one for the largest weight.
    """
    groups = weight.reshape(weight.shape[0], -1, scheme.group_size)
    largest = groups.abs().amax(-1)
    whole = _whole(largest, scheme)
    matters = None if importance is None else importance.reshape(1, -1, scheme.group_size)
    best: tuple[Tensor, Tensor] | None = None
    for scale in _scales(largest, whole, scheme, is_searched=is_searched):
        factor = (scale * whole).unsqueeze(-1)
        lost = (values_of(nearest(groups / factor)) * factor).sub_(groups).square_()
        error = (lost if matters is None else lost.mul_(matters)).sum(-1)
        if best is None:
            best = error, scale
        else:
            better = error < best[0]
            best = torch.where(better, error, best[0]), torch.where(better, scale, best[1])
    assert best is not None, "no scale to try"
    return Fp4Grid(scheme, best[1], whole)


def _whole(largest: Tensor, scheme: Fp4Scheme) -> Tensor:
    """Return the factor of all weights, with which the largest scale is the largest of its type."""
    most = largest.max()
    if scheme.has_powers or not bool(most > 0):
        return torch.ones((), device=largest.device)
    return 1 / (LARGEST * E4M3_MAX / most)


def _scales(
    largest: Tensor, whole: Tensor, scheme: Fp4Scheme, *, is_searched: bool
) -> list[Tensor]:
    if scheme.has_powers:
        # As the standard has it: the largest weight between the values 4 and 8.
        power = torch.floor(torch.log2(largest.clamp_min(2.0**-120))) - 2
        steps = (0, 1, -1) if is_searched else (0,)
        return [torch.exp2((power + step).clamp(LEAST_POWER, MOST_POWER)) for step in steps]
    wanted = largest / (LARGEST * whole)
    factors = (1.0, *(f for f in AROUND_LARGEST if f != 1)) if is_searched else (1.0,)
    limited = ((wanted * factor).clamp(SMALLEST_SCALE, E4M3_MAX) for factor in factors)
    return [scale.to(torch.float8_e4m3fn).float() for scale in limited]
