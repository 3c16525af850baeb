"""Makes 4-bit floats by GPTQ, or rounds weights that no text reached to the nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.quant.formats.scheme import Fp4Scheme
from appliance.quant.methods import data_free, gptq

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.run.options import QuantizedWeight


def quantize_linear(
    weight: Tensor, hessian: Tensor | None, scheme: LinearScheme, dtype: torch.dtype
) -> QuantizedWeight:
    """Quantize a weight; see `Quantizer`."""
    assert isinstance(scheme, Fp4Scheme), scheme
    if hessian is None or not hessian.any():  # its inputs were 0 in all text
        return data_free.quantize_linear(weight, None, scheme, dtype)
    return gptq.quantize(weight, hessian, scheme, dtype).weight
