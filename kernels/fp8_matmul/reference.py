"""FP8 matmul by definition, and the quantization of activations to e4m3 row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance.kernels.packed_matmul.reference import DenseLinear
from appliance.kernels.weights.fp8 import E4M3_MAX, Fp8Weight


def prepare_linear(weight: Fp8Weight, bias: Tensor | None, dtype: torch.dtype) -> DenseLinear:
    """Lay a weight out for the reference: dense float32, for activations of any `dtype`."""
    assert dtype.is_floating_point, dtype
    return DenseLinear(weight.dequantize(), None if bias is None else bias.float())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize activations, each row by its largest magnitude.

    Args:
        x: (num_tokens, in_features).

    Returns:
        (num_tokens, in_features) float8_e4m3fn and (num_tokens,) float32, with x about
        code * scale; zeros for a row of zeros.
    """
    x = x.float()
    scale = x.abs().amax(dim=1) / E4M3_MAX
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return (x * inverse[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
