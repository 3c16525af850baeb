"""Widens GGUF types that are not held as they are, and measures the loss.

Types without kernels anywhere get codes of 8 bits in groups of 32. A GPU's kernels read no GGML
blocks: for them Q5_0 and Q5_1 become 8 bits without loss, Q4_K and Q5_K keep their codes with
scales rounded to float16, and the others get codes of 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from appliance.gguf.lossless import GROUP_SIZE, packed
from appliance.kernels.ggml import DEQUANTIZE_AT_ONCE
from appliance.kernels.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ggml import GgmlWeight

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


def requantize(values: Tensor) -> PackedWeight:
    """Quantize (out_features, in_features) float32 to 8-bit codes in groups of 32.

    Codes are around 128, with 127 steps to each group's largest weight.
    """
    groups = values.unflatten(1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(dim=-1) / LARGEST_CODE).half()
    steps = torch.where(scale > 0, scale.float().reciprocal(), 0).unsqueeze(-1)
    codes = (groups * steps).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).add_(128)
    return packed(codes.flatten(1).to(torch.uint8), scale, scale * -128, bits=8)


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

    return torch.from_numpy(dequantize(blocks.flatten(1).numpy(), GGMLQuantizationType[type_name]))


def widen(weight: GgmlWeight) -> tuple[PackedWeight, Loss]:
    """Bring a weight of GGML blocks into the packed form, on its device, some rows at a time."""
    num_rows, width = weight.shape
    step = max(1, DEQUANTIZE_AT_ONCE // width)
    whole, loss = None, Loss()
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        piece, lost = _widened_rows(weight.rows(rows))
        loss += lost
        if whole is None:
            whole = _room_for(num_rows, piece)
        for part in ("codes", "scale", "offset"):
            getattr(whole, part)[rows] = getattr(piece, part)
    assert whole is not None, "no rows"
    return replace(whole, input_order=weight.input_order), loss


def _widened_rows(weight: GgmlWeight) -> tuple[PackedWeight, Loss]:
    decoded = weight.decode()
    exact = decoded.weights()
    if decoded.scale.shape[1] * GROUP_SIZE != weight.shape[1] or weight.type_name in _TABLES:
        found = requantize(exact)
    elif decoded.offset is None:  # Q5_0, whose codes are around zero
        scale = decoded.scale.half()
        codes = (decoded.codes.to(torch.int16) + 128).to(torch.uint8)
        found = packed(codes, scale, scale * -128, bits=8)
    else:
        bits = 4 if weight.type_name == "Q4_K" else 8
        codes = decoded.codes
        codes = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        found = packed(codes, decoded.scale.half(), decoded.offset.half(), bits=bits)
    return found, Loss.between(exact, found.dequantize())


_TABLES = {"IQ4_NL", "IQ4_XS"}  # their codes choose from a table


def _room_for(num_rows: int, piece: PackedWeight) -> PackedWeight:
    def more(part: Tensor) -> Tensor:
        return part.new_empty(num_rows, *part.shape[1:])

    return PackedWeight(
        codes=more(piece.codes),
        scale=more(piece.scale),
        offset=more(piece.offset),
        offset_kind=OffsetKind.ADDITIVE,
        bits=piece.bits,
        group_size=piece.group_size,
    )
