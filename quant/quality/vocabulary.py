"""Computes softmax over a vocabulary in pieces, without a full row of logits.

Sums are relative to the largest logit so far and rescaled when a larger one comes (online softmax,
arXiv 1805.02867). Float32 sums within a piece and float64 across pieces are accurate to about 1e-6
nats per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """A model's predictions after some tokens of a text.

    Attributes:
        true_log_probs: of the tokens that follow, (num_places,) float64.
        top: the likeliest tokens, (num_places,) int64.
    """

    true_log_probs: Tensor
    top: Tensor


class Prediction:
    """One model's next-token distributions, computed from pieces of their logits.

    Args:
        targets: (num_places,) int64, the tokens that follow.
    """

    def __init__(self, targets: Tensor) -> None:
        self._targets = targets
        self._largest = targets.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        self._top = torch.zeros_like(targets)
        self._true = torch.zeros_like(targets, dtype=torch.float32)
        self.total = torch.zeros_like(targets, dtype=torch.float64)  # of exp(logit - largest)
        self.rescale = torch.zeros_like(self.total)  # factor for sums of earlier pieces
        self.logits = torch.empty(0)  # the last piece
        self.weights = torch.empty(0)  # its exp, relative to the largest so far

    def add(self, logits: Tensor, first: int) -> None:
        """Add logits (num_places, n) float32 of the n tokens from `first` on."""
        values, tokens = logits.max(dim=-1)
        larger = values > self._largest
        largest = torch.where(larger, values, self._largest)
        self._top = torch.where(larger, tokens + first, self._top)
        self.rescale = (self._largest - largest).double().exp()
        self._largest = largest
        self.logits = logits
        self.weights = (logits - largest.unsqueeze(1)).exp_()
        self.total = self.total * self.rescale + self.weights.sum(dim=-1).double()
        where = self._targets - first
        inside = (where >= 0) & (where < logits.shape[1])
        picked = logits.gather(1, where.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
        self._true = torch.where(inside, picked, self._true)

    @property
    def log_total(self) -> Tensor:
        """Log of the sum of exp(logit), (num_places,) float64."""
        return self._largest.double() + self.total.log()

    def places(self) -> Places:
        """Return the predictions once all pieces are added."""
        return Places(self._true.double() - self.log_total, self._top)


class Gap:
    """Computes KL(base || candidate) in pieces; add each piece to both predictions first."""

    def __init__(self, base: Prediction, candidate: Prediction) -> None:
        self._base = base
        self._candidate = candidate
        self._sum = torch.zeros_like(base.total)

    def add(self) -> None:
        """Add the last piece of both predictions."""
        base = self._base
        difference = (base.logits - self._candidate.logits).mul_(base.weights)
        self._sum = self._sum * base.rescale + difference.sum(dim=-1).double()

    def klds(self) -> Tensor:
        """Return nats, (num_places,) float64; exactly 0 if both are equal."""
        base, candidate = self._base, self._candidate
        mean = self._sum / base.total
        return (mean - (base.log_total - candidate.log_total)).clamp(min=0)
