"""The figures of a quality card that a server shows: what quantizing its weights cost.

Reads the few fields it needs of the file that `appliance quantize` leaves beside the weights, so
that a card of a later version is understood as long as they keep their meaning.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from appliance.events import QualityFact

CARD_NAME = "quality.json"
MAX_CARD_BYTES = 4 * 2**20

logger = logging.getLogger(__name__)


class _Figure(msgspec.Struct, frozen=True):
    value: float
    error: float = 0.0


class _Model(msgspec.Struct, frozen=True):
    name: str
    parameters: int
    stored_bytes: int


class _Comparison(msgspec.Struct, frozen=True):
    perplexity_ratio: _Figure
    kld_mean: _Figure
    kld_p99: float
    same_top_percent: _Figure


class _Card(msgspec.Struct, frozen=True):
    model: _Model
    perplexity: _Figure
    base: _Model | None = None
    comparison: _Comparison | None = None


def card_path(model: Path) -> Path:
    """Where the card of a model folder or of a single weight file lies."""
    return model / CARD_NAME if model.is_dir() else model.with_name(f"{model.stem}.{CARD_NAME}")


def quality_facts(model: Path) -> tuple[QualityFact, ...]:
    """What the card beside a model says; nothing if there is none.

    A card that cannot be read is no reason not to serve, so that is a warning.
    """
    path = card_path(model)
    try:
        if not path.is_file():
            return ()
        if path.stat().st_size > MAX_CARD_BYTES:
            raise ValueError(f"it is larger than {MAX_CARD_BYTES // 2**20} MiB")
        card = msgspec.json.decode(path.read_bytes(), type=_Card)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        logger.warning("the quality card %s is not shown: %s", path, error)
        return ()
    bits = card.model.stored_bytes * 8 / max(1, card.model.parameters)
    against = "" if card.base is None else f"against {card.base.name}"
    facts = [_fact("bits_per_weight", bits), _fact("perplexity", card.perplexity.value)]
    if (found := card.comparison) is not None:
        facts += [
            _fact("kld_mean", found.kld_mean.value, against),
            _fact("kld_p99", found.kld_p99, against),
            _fact("same_top_share", found.same_top_percent.value / 100, against),
            _fact("perplexity_ratio", found.perplexity_ratio.value, against),
        ]
    return tuple(facts)


def _fact(name: str, value: float, note: str = "") -> QualityFact:
    return QualityFact(name=name, value=value, note=note)
