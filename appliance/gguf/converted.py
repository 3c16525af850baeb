"""Widens GGUF types that no kernel multiplies to codes of 8 bits in groups of 32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.gguf.lossless import GROUP_SIZE, centered
from appliance.kernels import arrays

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.packed import PackedWeight

LARGEST_CODE = 127


def requantize(values: Tensor) -> PackedWeight:
    """Quantize (out_features, in_features) float32 to 8-bit codes in groups of 32.

    Codes are around 128, with 127 steps to each group's largest weight.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    scale = (abs(groups).amax(-1) / LARGEST_CODE).half()
    steps = (1 / (scale.float() + (scale == 0))).unsqueeze(-1)
    codes = (groups * steps).round().clip(-LARGEST_CODE, LARGEST_CODE) + 128
    return centered(arrays.cast(codes.flatten(1), "uint8"), scale, bits=8)


def exact_values(type_name: str, blocks: Tensor) -> Tensor:
    """Dequantize rows of a type that only the `gguf` package reads.

    Args:
        blocks: (out_features, blocks, bytes per block) uint8.

    Returns:
        (out_features, in_features) float32.
    """
    # Imported late: other types do not need it, and it takes a quarter of a second.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(blocks.flatten(1).numpy(), GGMLQuantizationType[type_name])
    return arrays.like(blocks, values)  # type: ignore[no-any-return]
