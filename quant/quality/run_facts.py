"""Keeps the facts of a quantize run beside its weights, for the card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from appliance.errors import CheckpointError
from appliance.files import write_json
from appliance.quant.quality.card import QuantizeFacts, beside, card_of, weights_fingerprint

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.quant.run.report import QuantizeReport

NAME = "quantize.json"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Content of the file.

    Attributes:
        weights: fingerprint of the run's weight files.
    """

    weights: str
    facts: QuantizeFacts


def keep_facts(report: QuantizeReport) -> QuantizeFacts:
    """Write a finished run's facts beside its weights, or raise CheckpointError; return them."""
    facts = QuantizeFacts(
        method=report.method,
        scheme=report.scheme,
        calibration=report.calibration,
        calibration_fingerprint=report.calibration_fingerprint,
        seconds=report.seconds,
        losses=report.losses,
        peak_ram_bytes=report.peak_ram,
        peak_vram_bytes=report.peak_vram,
        notes=report.notes,
    )
    write_facts(facts, report.out)
    return facts


def write_facts(facts: QuantizeFacts, model: Path) -> None:
    """Write a run's facts beside its weights, or raise CheckpointError."""
    content = RunFacts(weights_fingerprint(model), facts)
    write_json(beside(model, NAME), msgspec.to_builtins(content))


def facts_of_run(model: Path) -> QuantizeFacts | None:
    """Read the facts of the run that made these weights; None if it was not ours."""
    try:
        run = msgspec.json.decode(beside(model, NAME).read_bytes(), type=RunFacts)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        run = None
    if run is not None and run.weights == weights_fingerprint(model):
        return run.facts
    try:
        card = card_of(model)
    except CheckpointError:
        return None  # the card is damaged or describes other weights
    return None if card is None else card.quantize
