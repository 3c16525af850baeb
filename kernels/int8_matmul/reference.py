"""Int8 matmul by definition: round the inputs, then multiply by any linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from appliance.kernels.packed_matmul.tiled import kernel_group_size
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight

if TYPE_CHECKING:
    from appliance.kernels.operations import Linear
    from appliance.kernels.weights.weight import Weight

MOST = 127  # of a code
LEAST_SCALE = 2.0**-126  # smaller ones are taken for 0: their inverse is not finite
GGML_GROUPS = {"Q4_K": 32}  # of types that do not become packed weights


def quantize_inputs(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round rows to int8, with a scale for each group of inputs: the largest becomes 127.

    Args:
        x: (num_tokens, in_features).
        group_size: inputs that share a scale; the last group may have fewer.

    Returns:
        Codes (num_tokens, padded in_features) int8, rounded to nearest even, and scales
        (num_tokens, groups) float32, which are NaN where a number of the group is not finite.
    """
    more = -x.shape[1] % group_size
    groups: Tensor = functional.pad(x.float(), (0, more)).unflatten(1, (-1, group_size))
    is_finite = groups.isfinite()
    groups = groups.where(is_finite, 0)
    scale = groups.abs().amax(2) / MOST
    has = scale >= LEAST_SCALE
    inverse = torch.where(has, 1 / torch.where(has, scale, 1), 0)
    codes = (groups * inverse.unsqueeze(2)).round().to(torch.int8).flatten(1)
    return codes, torch.where(is_finite.all(2), torch.where(has, scale, 0), torch.nan)


def dequantize_inputs(codes: Tensor, scale: Tensor, in_features: int) -> Tensor:
    """Invert `quantize_inputs` as far as it can be: (num_tokens, in_features) float32."""
    groups: Tensor = codes.float().unflatten(1, (scale.shape[1], -1)) * scale.unsqueeze(2)
    return groups.flatten(1)[:, :in_features]


def group_size_of(weight: Weight) -> int | None:
    """Return how many inputs share a scale with the kernel; None if it takes no such weight."""
    if isinstance(weight, GgmlWeight):
        return None if weight.input_order is not None else GGML_GROUPS.get(weight.type_name)
    if not isinstance(weight, PackedWeight) or weight.bits != 4 or weight.input_order is not None:
        return None
    return kernel_group_size(weight.group_size)


@dataclass(frozen=True, slots=True)
class RoundingLinear:
    """Multiplies x by a linear as if it were rounded to int8, all else as the linear does."""

    linear: Linear
    group_size: int

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), dtype of x."""
        codes, scale = quantize_inputs(x, self.group_size)
        return self.linear(dequantize_inputs(codes, scale, self.in_features).to(x.dtype))
