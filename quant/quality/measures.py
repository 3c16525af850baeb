"""Compares two models' predictions token by token.

The measures are those of llama.cpp's perplexity tool; KL divergences are in nats, base first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.quant.quality.card import Comparison, Figure, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


HISTOGRAM_LOW, HISTOGRAM_HIGH = -6, 2  # decades of KL divergence
BINS_PER_DECADE = 4


@dataclass(frozen=True, slots=True)
class Places:
    """A model's predictions after some tokens of a text.

    Attributes:
        true_log_probs: of the tokens that follow, (num_places,) float64.
        top: the likeliest tokens, (num_places,) int64.
    """

    true_log_probs: Tensor
    top: Tensor

    def part(self, where: slice) -> Places:
        return Places(self.true_log_probs[where], self.top[where])


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


class Losses:
    """Collects each token's negative log likelihood, window by window."""

    def __init__(self) -> None:
        self.windows: list[Tensor] = []  # nats, (num_places,) float64 each

    def add(self, places: Places) -> None:
        """Add the places of one window."""
        self.windows.append(-places.true_log_probs.cpu())

    @property
    def values(self) -> Tensor:
        """Nats of all windows, (num_places,) float64."""
        return torch.cat(self.windows)

    def perplexity(self) -> Figure:
        """Return exp of the mean loss, with the mean's standard error propagated."""
        mean, error = _mean(self.windows)
        value = math.exp(mean)
        return Figure(value, value * error)


class Divergence:
    """Collects a candidate's divergence from its base, window by window."""

    def __init__(self) -> None:
        self._base = Losses()
        self._candidate = Losses()
        self._klds: list[Tensor] = []
        self._same_top: list[Tensor] = []

    def add(self, base: Places, candidate: Places, klds: Tensor) -> None:
        """Add the tokens of one window with their KL(base || candidate) in nats."""
        self._base.add(base)
        self._candidate.add(candidate)
        self._klds.append(klds.cpu())
        self._same_top.append((base.top == candidate.top).double().cpu())

    def part(self, windows: Iterable[int]) -> Divergence:
        """Return the divergence over some of the windows, by the order in which they came."""
        found = Divergence()
        for index in windows:
            found._base.windows.append(self._base.windows[index])
            found._candidate.windows.append(self._candidate.windows[index])
            found._klds.append(self._klds[index])
            found._same_top.append(self._same_top[index])
        return found

    @property
    def klds(self) -> Tensor:
        """KL(base || candidate), nats, (num_places,) float64."""
        return torch.cat(self._klds)

    def summary(self) -> Comparison:
        pairs = list(zip(self._base.windows, self._candidate.windows, strict=True))
        log_ratio, log_ratio_error = _mean([candidate - base for base, candidate in pairs])
        ratio = math.exp(log_ratio)
        klds = self.klds
        kld, kld_error = _mean(self._klds)
        median, p99, p999 = torch.quantile(klds, klds.new_tensor([0.5, 0.99, 0.999])).tolist()
        same_top, same_top_error = _mean(self._same_top)
        changes = [(-candidate).exp() - (-base).exp() for base, candidate in pairs]
        mean_change, mean_change_error = _mean(changes)
        square, square_error = _mean([change.square() for change in changes])
        rms = math.sqrt(square)
        return Comparison(
            places=len(klds),
            perplexity=self._candidate.perplexity(),
            base_perplexity=self._base.perplexity(),
            perplexity_ratio=Figure(ratio, ratio * log_ratio_error),
            kld_mean=Figure(kld, kld_error),
            kld_median=median,
            kld_p99=p99,
            kld_p999=p999,
            kld_max=float(klds.max()),
            same_top_percent=Figure(100 * same_top, 100 * same_top_error),
            mean_change_percent=Figure(100 * mean_change, 100 * mean_change_error),
            rms_change_percent=Figure(100 * rms, 100 * square_error / (2 * rms) if rms else 0.0),
        )

    def histogram(self) -> Histogram:
        """Count tokens by powers of ten of their divergence; the end bins take outliers."""
        count = (HISTOGRAM_HIGH - HISTOGRAM_LOW) * BINS_PER_DECADE
        floor = 10.0**HISTOGRAM_LOW
        logs = self.klds.clamp(min=floor).log10()
        bins = ((logs - HISTOGRAM_LOW) * BINS_PER_DECADE).long().clamp(0, count - 1)
        edges = tuple(HISTOGRAM_LOW + i / BINS_PER_DECADE for i in range(count + 1))
        return Histogram(edges, tuple(torch.bincount(bins, minlength=count).tolist()))


def _mean(windows: Sequence[Tensor]) -> tuple[float, float]:
    """Return the mean over all tokens and its standard error over windows.

    Tokens of a window resemble each other, so windows are what is independent. Of a single window
    the error is that over its tokens.
    """
    values = torch.cat(list(windows))
    mean = float(values.mean())
    if len(windows) == 1:
        spread = float(values.std()) if len(values) > 1 else 0.0
        return mean, spread / math.sqrt(len(values))
    gaps = torch.stack([(window - mean).sum() for window in windows])
    return mean, math.sqrt(len(windows) / (len(windows) - 1) * float(gaps.square().sum())) / len(
        values
    )
