"""Tells by a checkpoint's config.json whether it judges relevance with a head of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_RANKER = "ForSequenceClassification"  # how the name of an architecture with such a head ends


def is_ranker(config: Mapping[str, Any]) -> bool:
    """Return True if `architectures` names a model with a head that gives a text one number."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith(_RANKER) for name in named)
