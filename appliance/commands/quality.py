"""Checks a model's quality card before `serve` loads the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import CheckpointError, QualityError
from appliance.events import QualityFact

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.quant.quality.card import Card
    from appliance.quant.quality.min_quality import Condition
    from appliance.server.models.model_state import ServedCard


@dataclass(frozen=True, slots=True)
class Quality:
    """A checked card.

    Attributes:
        card: for the server, if there is one.
        lines: for the banner: figures, then warnings.
    """

    card: ServedCard | None
    lines: tuple[str, ...]


def quality_of(
    model: Path, conditions: tuple[Condition, ...] | None, *, prompt_int8: bool = False
) -> Quality:
    """Read a model's card and check it against conditions.

    Args:
        model: folder or file.
        conditions: of `min_quality`; None checks nothing.
        prompt_int8: it is served with prompts in int8.

    Raises:
        QualityError: a refusing condition fails or cannot be judged.
    """
    from appliance.quant.quality.card import card_of
    from appliance.quant.quality.min_quality import Action, judge

    lines: list[str] = []
    card = None
    try:
        card = card_of(model)
    except CheckpointError as error:
        lines.append(f"warning: {error}")
    if card is not None:
        lines.append(card.line())
    if conditions is not None:
        verdicts = judge(
            conditions,
            card,
            model.name,
            is_quantized=_is_quantized(model),
            prompt_int8=prompt_int8,
        )
        refusals = [verdict.reason for verdict in verdicts if verdict.action is Action.REFUSE]
        if refusals:
            raise QualityError("; ".join(refusals) + "; or change --min-quality")
        lines += [f"warning: {verdict.reason}" for verdict in verdicts]
    return Quality(None if card is None else served_card(card), tuple(lines))


def served_card(card: Card) -> ServedCard:
    """Select the parts of a card that a server shows."""
    from appliance.quant.quality.card import to_json
    from appliance.server.models.model_state import ServedCard

    facts = {
        "bits_per_weight": card.model.bits_per_weight,
        "perplexity": card.perplexity.value,
    }
    compared = {}
    if (found := card.comparison) is not None:
        compared = {
            "kld_mean": found.kld_mean.value,
            "kld_p99": found.kld_p99,
            "same_top_share": found.same_top_percent.value / 100,
            "perplexity_ratio": found.perplexity_ratio.value,
        }
    for row in card.kinds:
        compared[f"kld_mean_{row.kind.replace(' ', '_')}"] = row.comparison.kld_mean.value
    if card.calls is not None and card.calls.base_right:
        compared["tool_calls_share"] = card.calls.right / card.calls.base_right
    against = "" if card.base is None else f"against {card.base.name}"
    return ServedCard(
        to_json(card),
        (
            *(QualityFact(name=name, value=value) for name, value in facts.items()),
            *(
                QualityFact(name=name, value=value, note=against)
                for name, value in compared.items()
            ),
        ),
    )


def _is_quantized(model: Path) -> bool:
    """Return True for quantized weights; assumes so for a single file."""
    from appliance.model_files.checkpoint import read_config  # imports NumPy

    return model.is_file() or "quantization_config" in read_config(model)
