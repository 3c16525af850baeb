"""Compares two models' predictions token by token.

The measures are those of llama.cpp's perplexity tool; KL divergences are in nats, base first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from appliance.quant.quality.card import Comparison, Figure, Histogram

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.quality.vocabulary import Places

HISTOGRAM_LOW, HISTOGRAM_HIGH = -6, 2  # decades of KL divergence
BINS_PER_DECADE = 4


class Losses:
    """Collects each token's negative log likelihood."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, places: Places) -> None:
        self._parts.append(-places.true_log_probs.cpu())

    @property
    def values(self) -> Tensor:
        """Nats, (num_places,) float64."""
        return torch.cat(self._parts)

    def perplexity(self) -> Figure:
        """Return exp of the mean loss, with the mean's standard error propagated."""
        mean, error = _mean(self.values)
        value = math.exp(mean)
        return Figure(value, value * error)


class Divergence:
    """Collects a candidate's divergence from its base."""

    def __init__(self) -> None:
        self._base = Losses()
        self._candidate = Losses()
        self._klds: list[Tensor] = []
        self._same_top: list[Tensor] = []

    def add(self, base: Places, candidate: Places, klds: Tensor) -> None:
        """Add tokens with their KL(base || candidate) in nats."""
        self._base.add(base)
        self._candidate.add(candidate)
        self._klds.append(klds.cpu())
        self._same_top.append((base.top == candidate.top).double().cpu())

    @property
    def klds(self) -> Tensor:
        """KL(base || candidate), nats, (num_places,) float64."""
        return torch.cat(self._klds)

    def summary(self) -> Comparison:
        base, candidate = self._base.values, self._candidate.values
        log_ratio, log_ratio_error = _mean(candidate - base)
        ratio = math.exp(log_ratio)
        klds = self.klds
        kld, kld_error = _mean(klds)
        median, p99, p999 = torch.quantile(klds, klds.new_tensor([0.5, 0.99, 0.999])).tolist()
        same_top, same_top_error = _mean(torch.cat(self._same_top))
        change = (-candidate).exp() - (-base).exp()
        mean_change, mean_change_error = _mean(change)
        square, square_error = _mean(change.square())
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


def _mean(values: Tensor) -> tuple[float, float]:
    """Return the mean and its standard error, as if tokens were independent."""
    count = len(values)
    spread = float(values.std()) if count > 1 else 0.0
    return float(values.mean()), spread / math.sqrt(count)
