"""Searches the FP8 scales of keys and values, per head, that change attention least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.kv_format import KVFormat, LayerPrecision
from appliance.kernels.kv_page.codes import E4M3_MAX
from appliance.quant.kv.attention import attend_with

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.model.spec import AttentionSpec

    Row = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of one row of text

# E4M3 has eight steps between powers of two, the finest just below a power of two. A factor below 2
# moves a head's most important numbers to finer steps, and the range of 2**18 has room for it.
SHIFTS = tuple(2 ** (step / 8) for step in range(8))


def largest_scales(x: Tensor) -> Tensor:
    """Return per-head scales of (tokens, heads, head_dim) that use all of E4M3's range."""
    return x.abs().amax(dim=(0, 2)).clamp(min=1e-6) / E4M3_MAX


def search_scales(
    spec: AttentionSpec,
    rows: Sequence[Row],
    exact: Sequence[Tensor],
    scales: Tensor,
    part: int,
    mean: Tensor | None = None,
) -> Tensor:
    """Shift the scales of keys or values to where attention's error is smallest.

    With scripts/benchmark kv_quality on SmolLM2-135M this leaves 0.0036 of KL divergence, and
    `largest_scales` 0.0051 (windows of 512 tokens; 0.0042 and 0.0049 with 224). Scales with the
    least squared error of keys and values, and clipping, left more than `largest_scales`.

    Args:
        rows: rows to measure on; see `attend_with`.
        exact: each row's result with a float32 cache.
        scales: (2, num_kv_heads) float32 of keys and of values, to start from.
        part: 0 shifts the keys' scales, 1 the values'.
        mean: subtracted from the keys.

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
    """Return the squared error of each KV head's queries, (num_kv_heads,)."""
    precision = LayerPrecision(KVFormat.FP8, scales, mean)
    lost = [
        (attend_with(spec, precision, *row) - wanted).square()
        for row, wanted in zip(rows, exact, strict=True)
    ]
    by_head: Tensor = torch.cat(lost).unflatten(1, (spec.num_kv_heads, -1)).sum(dim=(0, 2))
    return by_head
