"""FP8 scales of keys and values, by head, under which attention changes least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_cache import KVFormat, LayerPrecision
from appliance.kernels.kv_page.reference import E4M3_MAX
from appliance.quant.kv.attention import attend_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.model.spec import AttentionSpec

    Row = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of one row of text

# E4M3 has eight steps between powers of two, finest just below one of them, so that it matters
# where the numbers of a head that count for most lie between two powers: a factor below 2 moves
# them there. The range, 2**18, has room for that.
SHIFTS = tuple(2 ** (step / 8) for step in range(8))


def largest_scales(x: Tensor) -> Tensor:
    """Of each head of (tokens, heads, head_dim), so that the largest magnitude is E4M3's."""
    return x.abs().amax(dim=(0, 2)).clamp(min=1e-6) / E4M3_MAX


def search_scales(
    spec: AttentionSpec,
    rows: Sequence[Row],
    exact: Sequence[Tensor],
    scales: Tensor,
    part: int,
    mean: Tensor | None = None,
) -> Tensor:
    """Shift the scales of keys or of values to where the heads' results are least wrong.

    With scripts/benchmark kv_quality on SmolLM2-135M this leaves 0.0036 of KL divergence where
    `largest_scales` leave 0.0051 (windows of 512 tokens; 0.0042 and 0.0049 of 224). Scales of least
    squared error in keys and values, and clipping, left more than `largest_scales`.

    Args:
        spec: of the layer's attention.
        rows: to measure on; see `attend_with`.
        exact: what it gives for each of them, from a cache of float32.
        scales: (2, num_kv_heads) float32, of keys and of values, to begin with.
        part: 0 to shift those of the keys, 1 for the values.
        mean: taken off the keys.

    Returns:
        (2, num_kv_heads).
    """
    tried = []
    for shift in SHIFTS:
        shifted = scales.clone()
        shifted[part] *= shift
        tried.append(shifted)
    errors = torch.stack([_errors(spec, rows, exact, one, mean) for one in tried])
    found = scales.clone()
    found[part] *= torch.tensor(SHIFTS, device=scales.device)[errors.argmin(0)]
    return found


def _errors(
    spec: AttentionSpec,
    rows: Sequence[Row],
    exact: Sequence[Tensor],
    scales: Tensor,
    mean: Tensor | None,
) -> Tensor:
    """Squared errors of what comes out of each KV head's queries: (num_kv_heads,)."""
    precision = LayerPrecision(KVFormat.FP8, scales, mean)
    lost = [
        (attend_with(spec, precision, *row) - wanted).square()
        for row, wanted in zip(rows, exact, strict=True)
    ]
    by_head: Tensor = torch.cat(lost).unflatten(1, (spec.num_kv_heads, -1)).sum(dim=(0, 2))
    return by_head
