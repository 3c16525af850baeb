"""Stores packed weights in blocks of the GGML types Q4_0, Q4_1 and Q8_0.

Codes do not change; a group of more than 32 inputs repeats its scale. The layouts are those of
llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.kernels.packed import OffsetKind
from appliance.quant.formats.float16 import exact_enough
from appliance.quant.formats.grouping import scales_in_groups, zero_points_of

if TYPE_CHECKING:
    from appliance.kernels.packed import PackedWeight

GROUP = 32  # weights of a block


def block_type(name: str, weight: PackedWeight) -> str:
    """Choose the GGML type that holds all of a weight's codes and scales.

    Returns:
        `Q4_0` or `Q8_0`; `Q4_1` for 4 bits with zero points, its minima rounded to 16 bits.

    Raises:
        QuantizeError: no type holds them.
    """
    if weight.input_order is not None:
        raise _refusal(name, "inputs in an order of their own (act-order)")
    if weight.group_size % GROUP:
        raise _refusal(name, f"groups of {weight.group_size}")
    zero_points = zero_points_of(weight)
    if zero_points is not None and bool((zero_points == 1 << (weight.bits - 1)).all()):
        return "Q4_0" if weight.bits == 4 else "Q8_0"
    if weight.bits != 4:
        raise _refusal(name, "8 bits with zero points")
    return "Q4_1"


def encode(name: str, weight: PackedWeight, type_name: str) -> Tensor:
    """Encode a weight as (out_features, bytes of a row) uint8.

    Args:
        type_name: from `block_type`.

    Raises:
        QuantizeError: float16 cannot hold a scale.
    """
    rows = weight.shape[0]
    scale = _in_blocks(exact_enough(name, weight.scale), weight)
    codes = weight.unpack().view(rows, -1, GROUP)
    if type_name == "Q8_0":
        return torch.cat((_bytes(scale), codes ^ 0x80), dim=-1).flatten(1)
    halves = [_bytes(scale)]
    if type_name == "Q4_1":
        offset = weight.offset.float()
        if weight.offset_kind is OffsetKind.ZERO_POINT:
            offset = -offset * weight.scale.float()
        minimum = offset.half()
        if not bool(minimum.isfinite().all()):
            raise _refusal(name, "an offset beyond float16")
        halves.append(_bytes(_in_blocks(minimum, weight)))
    nibbles = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    return torch.cat((*halves, nibbles), dim=-1).flatten(1)


def _in_blocks(values: Tensor, weight: PackedWeight) -> Tensor:
    """Repeat values (rows, groups) once per 32 inputs."""
    return scales_in_groups(values, weight.group_size, GROUP)


def _bytes(halves: Tensor) -> Tensor:
    """View float16 (rows, blocks) as bytes (rows, blocks, 2)."""
    return halves.contiguous().unsqueeze(-1).view(torch.uint8)


def _refusal(name: str, what: str) -> QuantizeError:
    return QuantizeError(
        f"{name} has {what}, which no block of Q4_0, Q4_1 or Q8_0 holds; quantize it with --bits 4,"
        " or with --method int8 --group-size 32"
    )
