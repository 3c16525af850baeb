"""Recognizes checkpoints with a classification head that judges relevance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANKER = "ForSequenceClassification"  # suffix of an architecture with such a head


def is_ranker(config: Mapping[str, Any]) -> bool:
    """Return True if config.json's `architectures` names one with a classification head."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith(_RANKER) for name in named)
