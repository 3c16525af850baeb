"""Widens GGUF types that are not held as they are, and measures the loss.

Types without kernels anywhere get codes of 8 bits in groups of 32. A GPU's kernels read no GGML
blocks: for them Q5_0 and Q5_1 become 8 bits without loss, Q4_K and Q5_K keep their codes with
scales rounded to float16, and the others get codes of 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.gguf.loss import Loss
from appliance.gguf.lossless import GROUP_SIZE, centered, packed
from appliance.kernels import arrays
from appliance.kernels.ggml import DEQUANTIZE_AT_ONCE
from appliance.kernels.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.ggml import GgmlWeight

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
        codes = arrays.viewed(decoded.codes, "uint8") ^ 0x80
        found = centered(codes, scale, bits=8)
    else:
        bits = 4 if weight.type_name == "Q4_K" else 8
        codes = decoded.codes
        codes = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
        found = packed(codes, decoded.scale.half(), decoded.offset.half(), bits=bits)
    return found, Loss.between(exact, found.dequantize())


_TABLES = {"IQ4_NL", "IQ4_XS"}  # their codes choose from a table


def _room_for(num_rows: int, piece: PackedWeight) -> PackedWeight:
    def more(part: Tensor) -> Tensor:
        return arrays.empty((num_rows, *part.shape[1:]), part.dtype, part)  # type: ignore[no-any-return]

    return PackedWeight(
        codes=more(piece.codes),
        scale=more(piece.scale),
        offset=more(piece.offset),
        offset_kind=OffsetKind.ADDITIVE,
        bits=piece.bits,
        group_size=piece.group_size,
    )
