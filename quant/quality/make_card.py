"""Measures a checkpoint and makes its quality card."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from appliance.errors import QuantizeError
from appliance.kernels.kv_format import KVFormat
from appliance.model.executor import heads_of
from appliance.model.layer_weights import ExpertsWeights
from appliance.model.reader import ModelReader
from appliance.model.source import open_model
from appliance.quant.quality.card import (
    Alternative,
    Card,
    Cost,
    KVRow,
    ModelFacts,
    TextFacts,
    card_of,
)
from appliance.quant.quality.evaluate import EvaluationOptions, check_same_model, evaluate
from appliance.quant.quality.facts import PeakMemory, facts_of, facts_of_run, quantizes_inputs
from appliance.quant.quality.kv_caches import KV_FORMATS, bytes_per_token, caches_of
from appliance.quant.quality.weight_sets import scheme_of
from appliance.quant.text.held_out import HeldOutText
from appliance.quant.walk.places import check_walked
from appliance.tokenizer import Tokenizer
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.model.source import ModelSource
    from appliance.quant.quality.card import Comparison, QuantizeFacts
    from appliance.quant.quality.evaluate import Evaluation
    from appliance.quant.quality.kv_caches import Caches
    from appliance.quant.quality.predict import OnProgress
    from appliance.quant.text.held_out import Windows

KV_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class CardOptions:
    """Settings of a card.

    Attributes:
        kv_tokens: most tokens to measure KV caches on.
        rounding: also measure rounding to nearest, if the weights are packed.
        compare: folders whose cards are shown as alternatives.
        max_ram: limit of the process's memory in bytes; None takes what is free.
    """

    text: HeldOutText = field(default_factory=HeldOutText)
    kv: tuple[KVFormat, ...] = KV_FORMATS
    kv_tokens: int = KV_TOKENS
    rounding: bool = True
    compare: tuple[Path, ...] = ()
    max_ram: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def make_card(
    model: Path,
    base: Path | None = None,
    options: CardOptions | None = None,
    on_progress: OnProgress | None = None,
) -> Card:
    """Measure a checkpoint.

    Args:
        model: the checkpoint, a folder or a GGUF file.
        base: the model it was made from; None compares nothing.
        on_progress: called with a stage, the work done and its total.

    Raises:
        QuantizeError: base and checkpoint are different models, or the text is too short.
        ModelError: one of them cannot be read.
    """
    options = options or CardOptions()
    started, cpu_started = time.monotonic(), _cpu_seconds()
    memory = PeakMemory(options.device)
    candidate = open_model(model)
    check_walked(candidate, "no quality card of it")
    original = None if base is None else open_model(base)
    tokenizer = Tokenizer.from_path(model)
    notes: list[str] = []
    if original is not None:
        check_same_model(original, candidate)
        check_same_tokens(tokenizer, Tokenizer.from_path(original.path), model, original.path)
    windows = options.text.windows_of(tokenizer)
    run = facts_of_run(model)
    if run is not None and _was_calibrated_with(run, windows):
        notes.append(
            f"measured on {windows.source}, which it was calibrated with too: these figures"
            " flatter it; give another --text"
        )
    if quantizes_inputs(candidate):
        notes.append(
            "made for inputs of fewer bits, too, on hardware that multiplies them; only its"
            " weights are measured"
        )
    # Without requested caches, a declared one is not measured either.
    caches, declared = caches_of(candidate, options.kv) if options.kv else ({}, None)
    if any(
        layer.format is KVFormat.FP8 and layer.head_scales is None
        for cache in caches.values()
        for layer in cache
    ):
        notes.append("the checkpoint has no scales for keys and values in FP8: measured with 1")
    what = EvaluationOptions(
        base=original,
        rounded=options.rounding and original is not None and _can_be_rounded(candidate, run),
        kv=caches,
        kv_windows=min(len(windows.tokens), max(1, options.kv_tokens // windows.length)),
        folder=model.parent if _is_writable(model.parent) else None,
        max_ram=options.max_ram,
        device=options.device,
    )
    compared = compared_cards(options.compare, windows)  # fails before the work
    found = evaluate(candidate, windows, what, on_progress)
    facts = facts_of(candidate)
    card = Card(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        model=facts,
        base=None if original is None else facts_of(original),
        text=TextFacts(
            windows.source,
            windows.fingerprint,
            len(windows.tokens),
            windows.length,
            windows.stride,
        ),
        perplexity=found.candidate.perplexity(),
        comparison=None if found.against is None else found.against.summary(),
        histogram=None if found.against is None else found.against.histogram(),
        layers=found.layers,
        kv=_kv_rows(candidate, caches, declared, found),
        alternatives=(*rounded_alternative(found, facts), *compared),
        quantize=run,
        notes=tuple(notes),
        cost=Cost(0, 0, 0, 0, ""),
    )
    ram, vram = memory.peaks()
    cost = Cost(
        time.monotonic() - started, _cpu_seconds() - cpu_started, ram, vram, options.device.type
    )
    return replace(card, cost=cost)


def check_same_tokens(ours: Tokenizer, theirs: Tokenizer, our_path: Path, their_path: Path) -> None:
    """Raise QuantizeError if a token id means different text to two tokenizers."""
    for token_id in range(max(ours.vocab_size, theirs.vocab_size)):
        if ours.token_bytes(token_id) != theirs.token_bytes(token_id):
            raise QuantizeError(
                f"token {token_id} is {ours.token_text(token_id)!r} to {our_path.name} and"
                f" {theirs.token_text(token_id)!r} to {their_path.name}: their predictions cannot"
                " be compared; give the model that it was made from as the base"
            )


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


def _can_be_rounded(candidate: ModelSource, run: QuantizeFacts | None) -> bool:
    """Return True if rounding differs from the run's method and supports the scheme."""
    if run is not None and run.method == "rtn":
        return False
    reader = ModelReader(candidate, torch.device("cpu"), torch.float32)
    layer = reader.layer(0)
    mlp = layer.mlp.expert(0) if isinstance(layer.mlp, ExpertsWeights) else layer.mlp
    mixed = [] if layer.mixer is None else [*layer.mixer.inputs, layer.mixer.output]
    parts = mixed if mlp is None else [*mixed, *mlp.gate_up, mlp.down]
    return any(scheme_of(part.weight) is not None for part in parts)


def _was_calibrated_with(run: QuantizeFacts, windows: Windows) -> bool:
    """Return True if calibration read these tokens, or the same text in other rows."""
    same_name = run.calibration.split(" of ")[-1].split(", ")[0] == windows.source
    return same_name or run.calibration_fingerprint == windows.fingerprint


def _kv_rows(
    source: ModelSource, caches: Caches, declared: str | None, found: Evaluation
) -> tuple[KVRow, ...]:
    rows = []
    values = sum(2 * count * dim for count, dim in heads_of(source.spec))
    for name, divergence in found.kv.items():
        size = bytes_per_token(source, caches[name])
        is_declared = name == declared
        rows.append(KVRow(name, size, 8 * size / values, divergence.summary(), is_declared))
    return tuple(rows)


def _is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK)


def _cpu_seconds() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime
