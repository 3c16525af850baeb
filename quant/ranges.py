"""Scales and zero points of groups: where the steps of a weight's codes lie.

The range of a group, from its lowest to its highest weight, is cut a little where that lowers the
error of what matters: each input counts by how large its activations are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.quant.pack import pack_codes

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.scheme import WeightScheme

WHOLE = (1.0,)
SHRUNK = tuple(1 - step / 40 for step in range(21))  # of the range; 1 keeps all of it


@dataclass(frozen=True, slots=True)
class Steps:
    """The grid that each group's weights are rounded to: w = (code - zero_point) * scale.

    Attributes:
        scale: (out_features, groups) float32, of values that the stored type holds exactly.
        zero_point: same shape and type; whole numbers in the range of the codes.
        scheme: bits, group size, symmetry.
        dtype: of scales as they are stored.
    """

    scale: Tensor
    zero_point: Tensor
    scheme: WeightScheme
    dtype: torch.dtype

    def codes(self, weight: Tensor, groups: Tensor | slice = slice(None)) -> Tensor:
        """Nearest codes, float32, of columns (out_features, n) that lie in `groups` (n,)."""
        steps = torch.round(weight / self.scale[:, groups]) + self.zero_point[:, groups]
        return steps.clamp_(0, self.scheme.max_code)

    def weights(self, codes: Tensor, groups: Tensor | slice = slice(None)) -> Tensor:
        """What codes (out_features, n) stand for."""
        return (codes - self.zero_point[:, groups]) * self.scale[:, groups]

    def pack(self, codes: Tensor) -> PackedWeight:
        """Store codes (out_features, in_features), which are whole numbers of any float type."""
        scheme = self.scheme
        scale = self.scale.to(self.dtype)
        return PackedWeight(
            codes=pack_codes(codes.to(torch.uint8), scheme.bits),
            scale=scale,
            offset=-scheme.zero_code * scale
            if scheme.symmetric
            else self.zero_point.to(self.dtype),
            offset_kind=OffsetKind.ADDITIVE if scheme.symmetric else OffsetKind.ZERO_POINT,
            bits=scheme.bits,
            group_size=scheme.group_size or codes.shape[1],
        )


def choose_steps(
    weight: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    *,
    importance: Tensor | None = None,
    shares: tuple[float, ...] = WHOLE,
) -> Steps:
    """Choose scale and zero point of every group.

    Args:
        weight: (out_features, in_features) float32, finite.
        scheme: its group size divides in_features.
        dtype: float16 or bfloat16, in which scales are stored.
        importance: (in_features,) float32, the mean square of each input; None: all alike.
        shares: of a group's range that are tried; the one of least weighted square error is
            taken, the first of equals.

    Returns:
        The steps of all groups.
    """
    group_size = scheme.group_size or weight.shape[1]
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = groups.aminmax(dim=-1)
    matters = None if importance is None else importance.reshape(1, -1, group_size)
    best: tuple[Tensor, Tensor, Tensor] | None = None  # error, scale, zero point
    for share in shares:
        scale, zero_point = _steps_of(low * share, high * share, scheme, dtype)
        if len(shares) == 1:
            return Steps(scale, zero_point, scheme, dtype)
        codes = torch.round(groups / scale.unsqueeze(-1)).add_(zero_point.unsqueeze(-1))
        codes.clamp_(0, scheme.max_code).sub_(zero_point.unsqueeze(-1))
        square = codes.mul_(scale.unsqueeze(-1)).sub_(groups).square_()
        error = (square if matters is None else square.mul_(matters)).sum(-1)
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
    return Steps(best[1], best[2], scheme, dtype)


def _steps_of(
    low: Tensor, high: Tensor, scheme: WeightScheme, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Steps from the lowest to the highest weight; see `rtn.quantize` for the symmetric case."""
    if scheme.symmetric:
        farthest = torch.where(high > -low, high, low)
        scale = _stored(-farthest / scheme.zero_code, dtype)
        return scale, torch.full_like(scale, scheme.zero_code)
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = _stored((high - low) / scheme.max_code, dtype)
    return scale, torch.round(-low / scale).clamp_(0, scheme.max_code)


def _stored(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round scales to the type they are stored in; a group of zeros gets 1, which divides."""
    rounded = scale.to(dtype).float()
    return torch.where(rounded == 0, torch.ones_like(rounded), rounded)
