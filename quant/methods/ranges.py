"""Chooses the scales and zero points of groups.

A group's range, from its lowest to its highest weight, shrinks if that lowers the error, weighted
by each input's energy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.quant.formats.ggml_forms import BlockScheme
from appliance.quant.formats.scheme import Fp4Scheme
from appliance.quant.methods import rtn
from appliance.quant.methods.block_grids import BlockGrid, beside, choose_blocks
from appliance.quant.methods.fp4_grids import Fp4Grid, choose_floats

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.weights.packed import PackedWeight
    from appliance.quant.formats.scheme import GroupedScheme, WeightScheme

WHOLE = (1.0,)
AROUND = tuple(1.05 - step / 40 for step in range(12))  # shares of the range, some beyond it
SHRUNK = tuple(1 - step / 40 for step in range(21))  # shares of the range; 1 keeps all of it


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """The grid that each group's weights are rounded to: w = (code - zero_point) * scale.

    Attributes:
        scale: (out_features, groups) float32, exact in the stored type.
        zero_point: same shape and type; whole numbers in the range of the codes.
        dtype: stored type of scales.
    """

    scale: Tensor
    zero_point: Tensor
    scheme: WeightScheme
    dtype: torch.dtype

    @property
    def minimum(self) -> Tensor:
        """The weight of code 0, (out_features, groups) float32."""
        return -self.zero_point * self.scale

    def codes(self, weight: Tensor, group: int | None = None) -> Tensor:
        """Return the nearest codes, float32, of columns (out_features, n) of one group.

        Without `group` these are all columns in order.
        """
        columns, scale, zero_point = beside(weight, group, self.scale, self.zero_point)
        steps = torch.round(columns / scale).add_(zero_point)
        return steps.clamp_(0, self.scheme.max_code).reshape_as(weight)

    def weights(self, codes: Tensor, group: int | None = None) -> Tensor:
        """Return the weights of codes (out_features, n), all or of one group."""
        columns, scale, zero_point = beside(codes, group, self.scale, self.zero_point)
        return ((columns - zero_point) * scale).reshape_as(codes)

    def pack(self, codes: Tensor) -> PackedWeight:
        """Pack codes (out_features, in_features), whole numbers of any float type."""
        return rtn.pack(codes, self.scale, self.zero_point, self.scheme, self.dtype)


def choose_grid(
    weight: Tensor,
    scheme: GroupedScheme,
    dtype: torch.dtype,
    *,
    importance: Tensor | None = None,
    shares: tuple[float, ...] = WHOLE,
) -> CodeGrid | BlockGrid | Fp4Grid:
    """Choose every group's grid in the form that the scheme stores; see `choose_steps`.

    Blocks of GGML's types and floats have shares of their own to try, unless `shares` is one alone.
    """
    if isinstance(scheme, Fp4Scheme):
        return choose_floats(weight, scheme, importance=importance, is_searched=len(shares) > 1)
    if isinstance(scheme, BlockScheme):
        return choose_blocks(weight, scheme, importance=importance, is_searched=len(shares) > 1)
    return choose_steps(weight, scheme, dtype, importance=importance, shares=shares)


def choose_steps(
    weight: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    *,
    importance: Tensor | None = None,
    shares: tuple[float, ...] = WHOLE,
) -> CodeGrid:
    """Choose the scale and zero point of every group.

    Args:
        weight: (out_features, in_features) float32, finite.
        scheme: its group size divides in_features.
        dtype: of stored scales, float16 or bfloat16.
        importance: (in_features,) float32, mean square of each input; None: all equal.
        shares: shares of a group's range to try; the least weighted error wins, the first of
            equals.
    """
    group_size = scheme.group_size or weight.shape[1]
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = groups.aminmax(dim=-1)
    matters = None if importance is None else importance.reshape(1, -1, group_size)
    best: tuple[Tensor, Tensor, Tensor] | None = None  # error, scale, zero point
    for share in shares:
        scale, zero_point = rtn.steps_over(low * share, high * share, scheme, dtype)
        if len(shares) == 1:
            return CodeGrid(scale, zero_point, scheme, dtype)
        codes = torch.round(groups / scale.unsqueeze(-1)).add_(zero_point.unsqueeze(-1))
        codes.clamp_(0, scheme.max_code).sub_(zero_point.unsqueeze(-1))
        lost = codes.mul_(scale.unsqueeze(-1)).sub_(groups).square_()
        error = (lost if matters is None else lost.mul_(matters)).sum(-1)
        if best is None:
            best = error, scale, zero_point
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, zero_point, best[2]),
            )
    assert best is not None, "no share of the range to try"
    return CodeGrid(best[1], best[2], scheme, dtype)
