"""Widens the CPU library's tiles in torch; linear_rows.h does the same for one output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.structs import LANES, Format
from appliance.kernels.weights.fp4 import VALUES
from appliance.kernels.weights.ggml_types import (
    IQ1_VALUES,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
)

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.library_tiles.tiles import LinearTiles

_WORD = 4  # bytes of an output side by side
VALUES_OF = {
    Format.IQ4: tuple(map(float, IQ4_VALUES)),
    Format.IQ3_S: tuple(map(float, IQ3_S_VALUES)),
    Format.IQ3_XXS: tuple(map(float, IQ3_XXS_VALUES)),
    Format.IQ2: tuple(map(float, IQ2_VALUES)),
    Format.IQ1: tuple(map(float, IQ1_VALUES)),
    Format.E2M1: tuple(2 * value for value in (*VALUES, *(-value for value in VALUES))),
}


def widen(tiles: LinearTiles, dtype: torch.dtype) -> Tensor:
    """Return the weight, (out_features, in_features) in `dtype`, with columns in input order."""
    shape = (tiles.num_tiles * LANES, tiles.in_features)
    if tiles.dtype is not None:
        elements = tiles.codes.view(tiles.dtype).view(-1, tiles.in_features, LANES)
        found = elements.transpose(1, 2).reshape(shape).to(dtype)
    else:
        scale, offset = (part.transpose(1, 2).unsqueeze(3) for part in tiles.factors())
        grouped = _values(tiles).view(tiles.num_tiles, LANES, -1, tiles.group)
        found = (grouped * scale + offset).view(shape).to(dtype)
    found = found[: tiles.out_features]
    if tiles.order is None:
        return found
    return torch.empty_like(found).index_copy_(1, tiles.order.long(), found)


def _values(tiles: LinearTiles) -> Tensor:
    """Return codes, or the values that they name, (num_tiles, 16, in_features) float32."""
    codes = tiles.codes
    if tiles.format is Format.INT8:
        words = codes.view(tiles.num_tiles, -1, LANES, _WORD)
        return words.transpose(1, 2).flatten(2).float()
    if tiles.bits == 4:
        found = _spread(codes.view(tiles.num_tiles, -1, LANES, _WORD), 4)
    else:
        found = _of_planes(tiles)
    table = VALUES_OF.get(tiles.format)
    return found.float() if table is None else torch.tensor(table, device=codes.device)[found.int()]


def _of_planes(tiles: LinearTiles) -> Tensor:
    """Join the planes of 32 inputs: nibbles, pairs of bits, bits."""
    pieces = tiles.codes.view(tiles.num_tiles, tiles.in_features // 32, -1)
    total, at, low = None, 0, 0
    for bits in (4, 2, 1):
        if not tiles.bits & bits:
            continue
        size = 32 * bits * LANES // 8
        plane = pieces[:, :, at : at + size].reshape(tiles.num_tiles, -1, LANES, _WORD)
        part = _spread(plane, bits) << low
        total = part if total is None else total | part
        at, low = at + size, low + bits
    assert total is not None
    return total


def _spread(words: Tensor, bits: int) -> Tensor:
    """Spread (num_tiles, words, 16, 4) uint8 as (num_tiles, 16, inputs): codes of `bits` bits.

    A word of 4 bytes holds inputs 0 to 3 in its lowest bits, then 4 to 7, and so on.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device).unsqueeze(1)
    spread = words.unsqueeze(3) >> shifts & ((1 << bits) - 1)
    return spread.transpose(1, 2).flatten(2)
