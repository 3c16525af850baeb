"""Names what a card sets beside a checkpoint: rounding to nearest, and other folders' cards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from appliance.errors import QuantizeError
from appliance.quant.quality.card import (
    Alternative,
    ModelFacts,
    card_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.quant.quality.card import Comparison
    from appliance.quant.quality.evaluate import Evaluation
    from appliance.quant.text.held_out import Windows


def rounded_alternative(found: Evaluation, facts: ModelFacts) -> tuple[Alternative, ...]:
    if found.rounded is None:
        return ()
    summary = found.rounded.summary()
    name = "rounding to nearest, same form"
    return (_alternative(name, facts.bits_per_weight, summary),)


def compared_cards(folders: Sequence[Path], windows: Windows) -> list[Alternative]:
    found = []
    for folder in folders:
        card = card_of(folder)
        if card is None or card.comparison is None:
            raise QuantizeError(
                f"{folder} has no card to compare with; make one with:"
                f" appliance evaluate {folder} --against BASE"
            )
        if card.text.fingerprint != windows.fingerprint:
            raise QuantizeError(
                f"the card of {folder} was measured on another text ({card.text.source}); make it"
                " again with the same --text and --tokens"
            )
        name = card.model.name
        if card.quantize is not None:
            name += f" ({card.quantize.method})"
        found.append(_alternative(name, card.model.bits_per_weight, card.comparison))
    return found


def _alternative(name: str, bits: float, comparison: Comparison) -> Alternative:
    return Alternative(
        name=name,
        bits_per_weight=bits,
        kld_mean=comparison.kld_mean.value,
        same_top_percent=comparison.same_top_percent.value,
        perplexity=comparison.perplexity.value,
    )
