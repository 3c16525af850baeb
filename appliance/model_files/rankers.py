"""Recognizes checkpoints with a classification head that judges relevance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANKER = "ForSequenceClassification"  # suffix of an architecture with such a head


def is_ranker(config: Mapping[str, Any]) -> bool:
    """Return True if config.json's `architectures` names one with a classification head."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith(_RANKER) for name in named)


def check_labels(config: Mapping[str, Any], origin: str) -> None:
    """Raise UnsupportedModelError for a head that sorts texts into classes."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise UnsupportedModelError(
            f"{origin}: id2label has {count} labels: models that sort texts into classes are not "
            "served; choose a reranker, which has one"
        )
