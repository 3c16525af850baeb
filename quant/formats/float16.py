"""Scales of models in bfloat16, stored as the float16 that AWQ and GPTQ folders hold."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.errors import QuantizeError

# A bfloat16 from here on is a float16 exactly. Below, float16's steps are 2 ** -24: too small for
# any weight of such a group to tell.
SMALLEST_EXACT = 2.0**-17


def exact_enough(name: str, scale: Tensor) -> Tensor:
    """Scales in float16: exact, but for those below 2 ** -17, which come within 2 ** -25.

    Raises:
        QuantizeError: a scale that float16 does not hold.
    """
    half = scale.to(torch.float16)
    exact = half.to(scale.dtype) == scale
    if not bool((exact | (scale.abs() < SMALLEST_EXACT)).all()):
        raise QuantizeError(
            f"{name} has a scale of {float(scale[~exact].abs().max()):g}, which float16 does not"
            " hold; use --format compressed-tensors"
        )
    return half
