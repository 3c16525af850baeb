"""Scores of given tokens in torch, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.operations import TokenScores
from appliance.kernels.sampling.ranking import likeliest

if TYPE_CHECKING:
    from torch import Tensor


def score_tokens(logits: Tensor, targets: Tensor, count: int) -> TokenScores:
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, targets[:, None]) - total
    top, top_ids = likeliest(logits, count)
    return TokenScores(chosen[:, 0], top - total, top_ids)
