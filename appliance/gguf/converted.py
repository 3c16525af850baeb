"""Converts GGUF types to the packed form with a small loss, and measures the loss.

Q4_K and Q5_K keep their codes, and their scales are rounded to float16: 5 and 9 bits per weight
where exact ones would take 6 and 10. All others get codes of 8 bits in groups of 32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.gguf import k_quants
from appliance.gguf.lossless import GROUP_SIZE, packed

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.packed import PackedWeight

LARGEST_CODE = 127


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a conversion, as sums of squares."""

    weights: float = 0.0
    errors: float = 0.0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.weights + other.weights, self.errors + other.errors)

    @property
    def relative(self) -> float:
        """Root mean square of the errors over that of the weights."""
        return float((self.errors / self.weights) ** 0.5) if self.weights else 0.0

    @classmethod
    def between(cls, exact: Tensor, found: Tensor) -> Loss:
        """Compare weights (out_features, in_features) float32."""
        return cls(float(exact.square().sum()), float((found - exact).square().sum()))


def convert(type_name: str, blocks: Tensor) -> tuple[PackedWeight, Callable[[], Tensor]]:
    """Convert rows of a matrix to the packed form.

    Args:
        type_name: any type that is neither dense nor in `LOSSLESS`.
        blocks: (out_features, blocks, bytes per block) uint8.

    Returns:
        The rows, and a function that makes their exact weights (out_features, in_features) float32.

    Raises:
        NotImplementedError: the type is unknown.
    """
    if type_name in _EXACT:
        exact = _EXACT[type_name](blocks)
        halved = replace(exact, scale=exact.scale.half(), offset=exact.offset.half())
        return halved, exact.dequantize
    values = k_quants.q6_k_values(blocks) if type_name == "Q6_K" else _any(type_name, blocks)
    return requantize(values), lambda: values


_EXACT: dict[str, Callable[[Tensor], PackedWeight]] = {
    "Q4_K": k_quants.q4_k,
    "Q5_K": k_quants.q5_k,
}


def requantize(values: Tensor) -> PackedWeight:
    """Quantize (out_features, in_features) float32 to 8-bit codes in groups of 32.

    Codes are around 128, with 127 steps to each group's largest weight.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(dim=-1) / LARGEST_CODE).half()
    steps = torch.where(scale > 0, scale.float().reciprocal(), 0).unsqueeze(-1)
    codes = (groups * steps).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).add_(128)
    return packed(codes.flatten(1).to(torch.uint8), scale, scale * -128, bits=8)


def _any(type_name: str, blocks: Tensor) -> Tensor:
    """Dequantize rare types with the `gguf` package."""
    # Imported late: the types above do not need it, and it takes a quarter of a second.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(blocks.flatten(1).numpy(), GGMLQuantizationType[type_name])
    return torch.from_numpy(values)
