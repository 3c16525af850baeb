"""Samples a whole batch in torch; sorts a vocabulary only if a row's top-p reaches that deep.

A row's own logits alone decide whether a shortcut is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.sampling.reference import GREEDY_BELOW

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.sampling.rows import SamplingRows

CANDIDATES = 1024  # in the sorted prefix, which nearly always holds the whole nucleus
STRETCH = 256  # tokens summed together in a walk over a whole vocabulary


def choose(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Sample; return -1 for a row with NaN, +inf or no finite value."""
    finite = logits.amax(dim=-1).isfinite()
    tokens = sample(logits.nan_to_num(nan=0.0), rows)
    return torch.where(finite, tokens, -1)


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Choose one token per row, as `reference.sample` does.

    Args:
        logits: (num_rows, vocab_size) float32, at least one finite value per row.
        rows: settings of each row, on the same device.

    Returns:
        (num_rows,) int64 token ids.
    """
    tokens = logits.argmax(dim=-1)
    random = rows.temperature >= GREEDY_BELOW
    ordered = (rows.top_k > 0) | (rows.top_p < 1.0)
    by_id = (random & ~ordered).nonzero().flatten()
    by_rank = (random & ordered).nonzero().flatten()
    if len(by_id):
        tokens[by_id] = _sample_by_id(logits[by_id], rows.select(by_id))
    if len(by_rank):
        tokens[by_rank] = _sample_by_rank(logits[by_rank], rows.select(by_rank))
    return tokens


def _sample_by_id(logits: Tensor, rows: SamplingRows) -> Tensor:
    probabilities = torch.softmax(logits / rows.temperature[:, None], dim=-1)
    floor = rows.min_p[:, None] * probabilities.amax(dim=-1, keepdim=True)
    return _invert_in_two_steps(probabilities.masked_fill_(probabilities < floor, 0), rows.uniform)


def _sample_by_rank(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Sample from the likeliest candidates; rows with a larger nucleus get a full sort."""
    scaled = logits / rows.temperature[:, None]
    total = scaled.logsumexp(dim=-1, keepdim=True)
    vocab_size = logits.shape[-1]
    depth = min(CANDIDATES, vocab_size)
    scores, token_ids = _top(scaled, depth)
    probabilities = (scores - total).exp()
    enough = (rows.top_k > 0) & (rows.top_k <= depth)
    enough |= (rows.top_k == 0) & (probabilities.sum(dim=-1) >= rows.top_p + 1e-6)
    tokens = _cut(probabilities, token_ids, rows)
    deep = (~enough).nonzero().flatten()
    if depth < vocab_size and len(deep):
        scores, token_ids = scaled[deep].sort(dim=-1, descending=True, stable=True)
        tokens[deep] = _cut((scores - total[deep]).exp(), token_ids, rows.select(deep))
    return tokens


def _top(scaled: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the `depth` best per row, falling, equal ones by rising id."""
    token_ids = scaled.topk(depth, dim=-1, sorted=False).indices.sort(dim=-1).values
    scores, order = scaled.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
    return scores, token_ids.gather(1, order)


def _cut(probabilities: Tensor, token_ids: Tensor, rows: SamplingRows) -> Tensor:
    """Apply top-k, top-p and min-p to ordered probabilities, then draw."""
    rank = torch.arange(probabilities.shape[-1], device=probabilities.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, rank.numel())
    kept = torch.where(rank < top_k[:, None], probabilities, 0.0)
    mass = torch.where(rows.top_k > 0, kept.sum(dim=-1), 1.0)
    mass_before = kept.cumsum(dim=-1, dtype=torch.float64) - kept
    keep = mass_before < (rows.top_p * mass)[:, None]
    keep &= kept >= rows.min_p[:, None] * kept[:, :1]
    keep[:, 0] = True
    chosen = _invert(torch.where(keep, kept, 0.0), rows.uniform)
    return token_ids.gather(1, chosen[:, None]).flatten()


def _invert_in_two_steps(weights: Tensor, uniform: Tensor) -> Tensor:
    """Do `_invert` for long rows: find the stretch first, so that only one is summed in order."""
    weights = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % STRETCH))
    stretches = weights.view(len(weights), -1, STRETCH)
    masses = stretches.sum(dim=-1, dtype=torch.float64)
    stretch = _invert(masses, uniform)[:, None]
    mass = masses.gather(1, stretch)
    mass_before = masses.cumsum(dim=-1).gather(1, stretch) - mass
    inner = ((uniform[:, None] * masses.sum(dim=-1, keepdim=True) - mass_before) / mass).flatten()
    inside = stretches[torch.arange(len(weights), device=weights.device), stretch.flatten()]
    return stretch.flatten() * STRETCH + _invert(inside, inner.clamp(0.0, 1.0))


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds uniform * total, never of weight 0."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).flatten()
    last = (weights > 0).to(torch.uint8).flip(-1).argmax(dim=-1)
    return index.minimum(weights.shape[-1] - 1 - last)
