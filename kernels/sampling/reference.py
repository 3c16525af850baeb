"""Sampling by definition: one row at a time, a full sort, float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.sampling.rows import SamplingRows

GREEDY_BELOW = 1e-5


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row.

    Tokens are ordered by falling probability (equal ones by rising id), then cut by top-k, top-p
    and min-p, each on the distribution after temperature. The token drawn is the first whose
    cumulative share of the rest exceeds the row's uniform number. A row with neither top-k nor
    top-p needs no order and walks the vocabulary by rising id.

    Args:
        logits: (num_rows, vocab_size) float32, at least one finite value per row.
        rows: settings of each row.

    Returns:
        (num_rows,) int64 token ids.
    """
    return torch.stack([_sample_row(row, rows, i) for i, row in enumerate(logits)])


def _sample_row(logits: Tensor, rows: SamplingRows, i: int) -> Tensor:
    temperature = float(rows.temperature[i])
    if temperature < GREEDY_BELOW:
        return logits.argmax()
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if rows.top_k[i] == 0 and rows.top_p[i] >= 1.0:
        ordered, token_ids = probabilities, torch.arange(len(probabilities))
    else:
        ordered, token_ids = probabilities.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if rows.top_k[i] > 0:
        keep[int(rows.top_k[i]) :] = False
    mass_before = (ordered * keep).cumsum(0) - ordered * keep
    keep &= mass_before < float(rows.top_p[i]) * float((ordered * keep).sum())
    keep &= ordered >= float(rows.min_p[i]) * ordered.max()
    keep[ordered.argmax()] = True  # top_p = 0 keeps the likeliest token
    cumulative = (ordered * keep).cumsum(0)
    chosen = (cumulative <= float(rows.uniform[i]) * float(cumulative[-1])).sum()
    return token_ids[chosen.clamp(max=int(keep.nonzero()[-1]))]
