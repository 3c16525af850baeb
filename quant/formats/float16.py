"""Converts bfloat16 scales to float16 for AWQ and GPTQ folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.errors import QuantizeError

if TYPE_CHECKING:
    from torch import Tensor

# From here on, float16 holds every bfloat16 exactly. Below, its steps are 2 ** -24, too small to
# change a weight of such a group.
SMALLEST_EXACT = 2.0**-17


def exact_enough(name: str, scale: Tensor) -> Tensor:
    """Convert scales to float16, exact from 2 ** -17 on, or raise QuantizeError.

    Below, the error is at most 2 ** -25.
    """
    half = scale.half()
    exact = half.to(scale.dtype) == scale
    if not bool((exact | (scale.abs() < SMALLEST_EXACT)).all()):
        raise QuantizeError(
            f"{name} has a scale of {float(scale[~exact].abs().max()):g}, which float16 does not"
            " hold; use --format compressed-tensors"
        )
    return half
