"""Figures of a model's divergence from its base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.model.source import open_model
from appliance.quant.quality.make_card import EvaluationOptions, evaluate

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.source import ModelSource
    from appliance.quant.quality.measures import Divergence
    from appliance.quant.text.held_out import Windows


def compare(base: ModelSource, candidate: Path, windows: Windows) -> dict[str, Any]:
    """Measure a checkpoint beside its base, the weights of both dequantized to float32."""
    found = evaluate(
        open_model(candidate), windows, EvaluationOptions(base=base, rounded=False)
    ).against
    assert found is not None
    by_window = found.klds.view(len(windows.tokens), -1).mean(1)
    return figures_of(found) | {"kld_by_window": [round(one, 6) for one in by_window.tolist()]}


def figures_of(found: Divergence) -> dict[str, float | int]:
    """Return the figures over all places; KL(base || candidate) in nats."""
    summary = found.summary()
    return {
        "tokens": summary.places,
        "kld_mean": round(summary.kld_mean.value, 6),
        "kld_error": round(summary.kld_mean.error, 6),
        "kld_p99": round(summary.kld_p99, 6),
        "kld_max": round(summary.kld_max, 6),
        "same_top_1_percent": round(summary.same_top_percent.value, 2),
        "perplexity": round(summary.perplexity.value, 4),
        "base_perplexity": round(summary.base_perplexity.value, 4),
    }
