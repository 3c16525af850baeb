"""Every measure against brute force in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from appliance.quant.quality.card import Comparison
from appliance.quant.quality.measures import Divergence, Gap, Losses, Prediction

PLACES, VOCABULARY = 40, 23
WINDOWS = [slice(0, 17), slice(17, 25), slice(25, PLACES)]
PIECES = [(0, 7), (7, 8), (8, 19), (19, 23)]


def logits(seed: int, spread: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PLACES, VOCABULARY, generator=generator) * spread


def targets() -> Tensor:
    return torch.randint(VOCABULARY, (PLACES,), generator=torch.Generator().manual_seed(9))


def compared(base: Tensor, candidate: Tensor, pieces: list[tuple[int, int]] = PIECES) -> Divergence:
    ours, theirs = Prediction(targets()), Prediction(targets())
    gap = Gap(ours, theirs)
    for first, last in pieces:
        ours.add(base[:, first:last], first)
        theirs.add(candidate[:, first:last], first)
        gap.add()
    divergence = Divergence()
    for rows in WINDOWS:
        places = [
            type(p)(p.true_log_probs[rows], p.top[rows]) for p in (ours.places(), theirs.places())
        ]
        divergence.add(places[0], places[1], gap.klds()[rows])
    return divergence


def error_over_windows(values: Tensor) -> float:
    """The standard error of a ratio of totals over clusters (Cochran, Sampling Techniques)."""
    totals = [float(values[rows].sum()) for rows in WINDOWS]
    sizes = [len(values[rows]) for rows in WINDOWS]
    mean = sum(totals) / sum(sizes)
    squares = sum((t - mean * n) ** 2 for t, n in zip(totals, sizes, strict=True))
    count = len(WINDOWS)
    average = sum(sizes) / count
    return math.sqrt(squares / (count - 1) / count) / average


def brute(base: Tensor, candidate: Tensor) -> dict[str, float]:
    p, q = base.double().softmax(-1), candidate.double().softmax(-1)
    rows, after = torch.arange(PLACES), targets()
    klds = torch.tensor([float((p[i] * (p[i] / q[i]).log()).sum()) for i in range(PLACES)])
    change = q[rows, after] - p[rows, after]
    return {
        "perplexity": math.exp(float(-q[rows, after].log().mean())),
        "base_perplexity": math.exp(float(-p[rows, after].log().mean())),
        "kld_mean": float(klds.mean()),
        "kld_error": error_over_windows(klds),
        "kld_median": float(klds.double().quantile(0.5)),
        "kld_p99": float(klds.double().quantile(0.99)),
        "kld_p999": float(klds.double().quantile(0.999)),
        "kld_max": float(klds.max()),
        "same_top": 100 * float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        "mean_change": 100 * float(change.mean()),
        "rms_change": 100 * math.sqrt(float(change.square().mean())),
    }


def found(summary: Comparison) -> dict[str, float]:
    return {
        "perplexity": summary.perplexity.value,
        "base_perplexity": summary.base_perplexity.value,
        "kld_mean": summary.kld_mean.value,
        "kld_error": summary.kld_mean.error,
        "kld_median": summary.kld_median,
        "kld_p99": summary.kld_p99,
        "kld_p999": summary.kld_p999,
        "kld_max": summary.kld_max,
        "same_top": summary.same_top_percent.value,
        "mean_change": summary.mean_change_percent.value,
        "rms_change": summary.rms_change_percent.value,
    }


def test_every_measure_is_what_its_definition_says() -> None:
    base = logits(1)
    candidate = base + logits(2, spread=1.0)
    assert found(compared(base, candidate).summary()) == pytest.approx(
        brute(base, candidate), rel=1e-5
    )


def test_how_the_vocabulary_is_cut_does_not_matter() -> None:
    base, candidate = logits(1), logits(2)
    whole = compared(base, candidate, [(0, VOCABULARY)])
    torch.testing.assert_close(compared(base, candidate).klds, whole.klds, rtol=0, atol=2e-6)


def test_large_logits_that_come_late_change_nothing() -> None:
    base, candidate = logits(1, spread=1.0), logits(2, spread=1.0)
    base[:, -1] += 80
    candidate[:, -1] += 78
    assert found(compared(base, candidate).summary()) == pytest.approx(
        brute(base, candidate), rel=1e-4, abs=1e-6
    )


def test_the_same_predictions_differ_by_nothing_at_all() -> None:
    summary = compared(logits(1), logits(1)).summary()
    assert summary.kld_max == 0
    assert summary.same_top_percent.value == 100
    assert summary.perplexity_ratio.value == 1
    assert summary.rms_change_percent.value == summary.rms_change_percent.error == 0


def test_standard_errors_are_those_of_means_carried_through() -> None:
    base, candidate = logits(1), logits(1) + logits(2, spread=1.0)
    summary = compared(base, candidate).summary()
    rows, after = torch.arange(PLACES), targets()
    ours = -candidate.double().log_softmax(-1)[rows, after]
    theirs = -base.double().log_softmax(-1)[rows, after]
    assert summary.perplexity.error == pytest.approx(
        math.exp(ours.mean()) * error_over_windows(ours), rel=1e-5
    )
    assert summary.perplexity_ratio.error == pytest.approx(
        math.exp((ours - theirs).mean()) * error_over_windows(ours - theirs), rel=1e-5
    )


def test_a_part_has_the_figures_of_its_windows() -> None:
    base, candidate = logits(1), logits(1) + logits(2, spread=1.0)
    whole = compared(base, candidate)
    part = whole.part([0, 2])
    kept = torch.cat([whole.klds[WINDOWS[0]], whole.klds[WINDOWS[2]]])
    assert torch.equal(part.klds, kept)
    assert part.summary().places == len(kept)
    (alone,) = [whole.part([1]).summary()]
    klds = whole.klds[WINDOWS[1]]
    assert alone.kld_mean.error == pytest.approx(float(klds.std()) / math.sqrt(len(klds)))


def test_the_histogram_counts_every_place_once() -> None:
    divergence = compared(logits(1), logits(1) + logits(2, spread=0.1))
    histogram = divergence.histogram()
    assert sum(histogram.counts) == PLACES
    assert len(histogram.log10_edges) == len(histogram.counts) + 1
    edges = [10**edge for edge in histogram.log10_edges]
    for count, low, high in zip(histogram.counts, edges, edges[1:], strict=False):
        inside = (divergence.klds >= low) & (divergence.klds < high)
        assert count == int(inside.sum())


def test_perplexity_of_certain_predictions_is_one() -> None:
    certain = torch.full((PLACES, VOCABULARY), -100.0)
    certain[torch.arange(PLACES), targets()] = 100.0
    prediction = Prediction(targets())
    prediction.add(certain, 0)
    losses = Losses()
    losses.add(prediction.places())
    assert losses.perplexity().value == 1.0
