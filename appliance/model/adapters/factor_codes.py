"""Quantizes an adapter's factors to 8 bits for places whose weights are packed, too.

Each rank has one scale, the product of its row's in A and its column's in B, and with it the number
between the two is as large as what it adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.model.adapters.targets import Expansion, PlacedFactors

if TYPE_CHECKING:
    from torch import Tensor

RANKS_AT_ONCE = 16  # of an expansion in the library
_ZERO = 128  # the code of 0
_LARGEST = 127  # of a code, from _ZERO


def coded(factors: PlacedFactors) -> PlacedFactors:
    """Return factors whose matrices are uint8, expansions of 16 ranks each.

    The ranks of each part are padded with zeros, and those that no output is expanded from are left
    out.
    """
    parts: dict[tuple[int, int], list[Expansion]] = {}
    for expansion in factors.expansions:
        ranks = expansion.first_rank, expansion.matrix.shape[1]
        parts.setdefault(ranks, []).append(expansion)
    shrink, scales, expansions, first = [], [], [], 0
    for (begin, count), own in parts.items():
        a, scale = (values[begin : begin + count] for values in (factors.shrink, factors.scales))
        of_rows = _largest(a, 1)
        of_columns = torch.stack([_largest(one.matrix, 0) for one in own]).amax(0)
        missing = -count % RANKS_AT_ONCE
        shrink.append(_padded(_codes(a, of_rows[:, None]), (0, 0, 0, missing)))
        scales.append(_padded(scale * of_rows * of_columns / _LARGEST**2, (0, missing), 0.0))
        for one in own:
            codes = _padded(_codes(one.matrix, of_columns), (0, missing))
            for at in range(0, count, RANKS_AT_ONCE):
                piece = codes[:, at : at + RANKS_AT_ONCE]
                expansions.append(Expansion(piece, one.first_output, first + at))
        first += count + missing
    return PlacedFactors(torch.cat(shrink), torch.cat(scales), tuple(expansions))


def _largest(values: Tensor, dim: int) -> Tensor:
    """Return the largest magnitudes along a dimension, none of them 0."""
    low, high = torch.aminmax(values, dim=dim)
    return torch.maximum(high, -low).float().clamp(min=1e-30)


def _codes(values: Tensor, largest: Tensor) -> Tensor:
    return (values * (_LARGEST / largest)).add_(_ZERO).round_().to(torch.uint8)


def _padded(values: Tensor, missing: tuple[int, ...], zero: float = _ZERO) -> Tensor:
    return torch.nn.functional.pad(values, missing, value=zero) if any(missing) else values
