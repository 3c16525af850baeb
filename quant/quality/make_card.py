"""Measures a checkpoint and makes its quality card.

Weights are dequantized and arithmetic is float32, so the checkpoint is measured and not the
kernels. KV caches are compared with a float32 cache over the checkpoint's own weights.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from appliance.errors import MemoryPlanError, QuantizeError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.int8_matmul.reference import group_size_of
from appliance.model.executor import heads_of
from appliance.model.layer_weights import ExpertsWeights
from appliance.model.reader import ModelReader
from appliance.model.source import open_model
from appliance.quant.quality.card import (
    Alternative,
    Card,
    Cost,
    KindRow,
    KVRow,
    ModelFacts,
    TextFacts,
    card_of,
)
from appliance.quant.quality.facts import PeakMemory, facts_of, facts_of_run, quantizes_inputs
from appliance.quant.quality.kv_caches import KV_FORMATS, bytes_per_token, caches_of
from appliance.quant.quality.pictures import compare_pictures, pictures_in
from appliance.quant.quality.predict import PredictionPass
from appliance.quant.quality.streams import (
    BASE,
    CANDIDATE,
    PROMPT_INT8,
    ROUNDED,
    ModelVariant,
    Streams,
)
from appliance.quant.quality.tool_calls import compare_calls
from appliance.quant.quality.weight_sets import RoundedWeights, StoredWeights, scheme_of
from appliance.quant.run.evaluation_memory import EvaluationMemory
from appliance.quant.run.memory import MemoryUse
from appliance.quant.text.held_out import HeldOutText, windows_of_kinds
from appliance.quant.walk.places import check_walked
from appliance.runtime import release_unused
from appliance.tokenizer import Tokenizer
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.model.linear import LinearPart
    from appliance.model.source import ModelSource
    from appliance.quant.quality.card import Comparison, LayerError, QuantizeFacts
    from appliance.quant.quality.kv_caches import Caches
    from appliance.quant.quality.measures import Divergence, Losses
    from appliance.quant.quality.predict import OnProgress
    from appliance.quant.text.held_out import Windows

KV_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class CardOptions:
    """Settings of a card.

    Attributes:
        kv_tokens: most tokens to measure KV caches on.
        rounding: also measure rounding to nearest, if the weights are packed.
        kinds: also measure the packaged passages, beside a base; see `windows_of_kinds`.
        calls: also let both models call tools; see `tool_calls`.
        pictures: folder of pictures, whose texts both models are measured on; see `pictures`.
        compare: folders whose cards are shown as alternatives.
        max_ram: limit of the process's memory in bytes; None takes what is free.
    """

    text: HeldOutText = field(default_factory=HeldOutText)
    kv: tuple[KVFormat, ...] = KV_FORMATS
    kv_tokens: int = KV_TOKENS
    rounding: bool = True
    kinds: bool = True
    calls: bool = True
    pictures: Path | None = None
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
        int8_group=_int8_group(candidate),
        folder=model.parent if _is_writable(model.parent) else None,
        max_ram=options.max_ram,
        device=options.device,
    )
    compared = compared_cards(options.compare, windows)  # fails before the work
    if options.pictures is not None:
        pictures_in(options.pictures)
    found = evaluate(candidate, windows, what, on_progress)
    kinds: tuple[KindRow, ...] = ()
    if options.kinds and original is not None:
        of_kinds = windows_of_kinds(tokenizer, windows.length)
        release_unused()
        try:
            if of_kinds.kinds:
                kinds = kinds_of(candidate, of_kinds, what, on_progress)
        except MemoryPlanError as error:
            notes.append(f"further kinds of text were not measured: {error}")
    calls = None
    if options.calls and original is not None:
        if on_progress is not None:
            on_progress("calling tools", 0, 1)
        device, most = options.device.type, options.max_ram
        calls = compare_calls(model, original.path, tokenizer, device=device, max_ram=most)
    shown = None
    if options.pictures is not None and original is not None:
        if on_progress is not None:
            on_progress("looking at pictures", 0, 1)
        device, most = options.device.type, options.max_ram
        shown = compare_pictures(
            model, original.path, options.pictures, device=device, max_ram=most
        )
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
        prompt_int8=None if found.prompt_int8 is None else found.prompt_int8.summary(),
        kinds=kinds,
        calls=calls,
        pictures=shown,
        cost=Cost(0, 0, 0, 0, ""),
    )
    ram, vram = memory.peaks()
    cost = Cost(
        time.monotonic() - started, _cpu_seconds() - cpu_started, ram, vram, options.device.type
    )
    return replace(card, cost=cost)


def kinds_of(
    candidate: ModelSource,
    windows: Windows,
    what: EvaluationOptions,
    on_progress: OnProgress | None = None,
) -> tuple[KindRow, ...]:
    """Compare a checkpoint with its base on windows of several kinds."""
    report = on_progress or (lambda stage, done, total: None)
    only = replace(what, rounded=False, kv={}, int8_group=None)
    against = evaluate(
        candidate,
        windows,
        only,
        lambda stage, done, total: report(f"{stage}, further kinds of text", done, total),
    ).against
    assert against is not None, "there is a base"
    places = {
        kind: [index for index, one in enumerate(windows.kinds) if one == kind]
        for kind in windows.kinds
    }
    return tuple(
        KindRow(kind, len(where), against.part(where).summary()) for kind, where in places.items()
    )


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
    return any(scheme_of(part.weight) is not None for part in _first_linears(candidate))


def _int8_group(candidate: ModelSource) -> int | None:
    """Return the longest group of the 4-bit linears of the first layer, which loses most."""
    found = [group_size_of(part.weight) for part in _first_linears(candidate)]
    return max((size for size in found if size is not None), default=None)


def _first_linears(candidate: ModelSource) -> list[LinearPart]:
    """Return the linears of the first layer, of experts those of the first."""
    reader = ModelReader(candidate, torch.device("cpu"), torch.float32)
    layer = reader.layer(0)
    mlp = layer.mlp.expert(0) if isinstance(layer.mlp, ExpertsWeights) else layer.mlp
    mixed = [] if layer.mixer is None else [*layer.mixer.inputs, layer.mixer.output]
    return mixed if mlp is None else [*mixed, *mlp.gate_up, mlp.down]


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


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Measurements to make.

    Attributes:
        base: the model the candidate was made from; None measures only perplexity and KV caches.
        rounded: also measure the base rounded to nearest in the candidate's scheme.
        kv: a precision per layer for each cache, by name; see `kv_caches.caches_of`.
        kv_windows: number of windows to measure caches and int8 on; None is all.
        int8_group: inputs that share a scale, to measure them rounded to int8 too; see `Card`.
        folder: for files of residual streams; None is the system's temporary folder.
        max_ram: limit of the process's memory in bytes; None takes what is free.
    """

    base: ModelSource | None = None
    rounded: bool = True
    kv: Mapping[str, tuple[LayerPrecision, ...]] = field(default_factory=dict)
    kv_windows: int | None = None
    int8_group: int | None = None
    folder: Path | None = None
    max_ram: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation.

    Attributes:
        candidate: losses of the checkpoint.
        against: its divergence from the base.
        rounded: divergence of the rounded base from the base.
        layers: errors of the candidate's layers against the base's.
        kv: divergence of each cache, by name.
        prompt_int8: divergence of rounded inputs.
    """

    candidate: Losses
    against: Divergence | None
    rounded: Divergence | None
    layers: tuple[LayerError, ...]
    kv: dict[str, Divergence]
    prompt_int8: Divergence | None = None


@torch.inference_mode()
def evaluate(
    candidate: ModelSource,
    windows: Windows,
    what: EvaluationOptions | None = None,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure a checkpoint.

    Args:
        windows: cut with the candidate's tokenizer.
        on_progress: called with a stage, the number of layers or windows done, and their total.

    Raises:
        QuantizeError: base and candidate are different models.
        ModelError: weights or activations are not finite.
        MemoryPlanError: the evaluation exceeds the memory it may use.
    """
    what = what or EvaluationOptions()
    report = on_progress or (lambda stage, done, total: None)
    highest = int(windows.tokens.max())
    if highest >= candidate.spec.vocab_size:
        raise QuantizeError(
            f"the text has token {highest}, but {candidate.path.name} knows"
            f" {candidate.spec.vocab_size}; its tokenizer belongs to another model"
        )
    variants = _variants(candidate, what)
    memory = EvaluationMemory(
        candidate,
        windows.length,
        windows.tokens.numel(),
        num_models=len({id(variant.weights) for variant in variants}),
        num_variants=len(variants),
        max_ram=what.max_ram,
    )
    tokens_at_once = memory.tokens_at_once(MemoryUse.now(what.device).ram)
    with tempfile.TemporaryDirectory(prefix=".evaluation-", dir=what.folder) as folder:
        streams = Streams(variants, windows.tokens, Path(folder), what.device, tokens_at_once)
        count = len(candidate.spec.layers)
        layers = []
        for index in range(count):
            report("evaluating layers", index, count)
            errors = streams.layer(index)
            if what.base is not None:
                layers.append(errors[CANDIDATE])
        report("evaluating layers", count, count)
        release_unused()  # free the layers' memory before the heads are read
        found = PredictionPass(streams, variants, windows, what.device, memory).run(report)
    return Evaluation(
        candidate=found.losses,
        against=found.gaps.get(CANDIDATE),
        rounded=found.gaps.get(ROUNDED),
        layers=tuple(layers),
        kv={name: found.gaps[name] for name in what.kv},
        prompt_int8=found.gaps.get(PROMPT_INT8),
    )


def check_same_model(base: ModelSource, candidate: ModelSource) -> None:
    """Raise QuantizeError if two models differ in vocabulary, width or number of layers."""
    for name, ours, theirs in (
        ("a vocabulary of {} tokens", candidate.spec.vocab_size, base.spec.vocab_size),
        ("a width of {}", candidate.spec.hidden_size, base.spec.hidden_size),
        ("{} layers", len(candidate.spec.layers), len(base.spec.layers)),
    ):
        if ours != theirs:
            raise QuantizeError(
                f"{candidate.path.name} has {name.format(ours)} and {base.path.name}"
                f" {name.format(theirs)}; give the model that it was made from as the base"
            )


def _variants(candidate: ModelSource, what: EvaluationOptions) -> list[ModelVariant]:
    """List the variants to run: the base first, KV caches and rounded inputs last."""
    stored = StoredWeights(candidate, what.device)
    variants: list[ModelVariant] = []
    if what.base is not None:
        check_same_model(what.base, candidate)
        base = StoredWeights(what.base, what.device)
        variants.append(ModelVariant(BASE, base))
        if what.rounded:
            variants.append(ModelVariant(ROUNDED, RoundedWeights(base, stored)))
    variants.append(ModelVariant(CANDIDATE, stored, is_traced=what.base is not None))
    for name, cache in what.kv.items():
        variants.append(ModelVariant(name, stored, cache, what.kv_windows))
    if what.int8_group is not None:
        variants.append(
            ModelVariant(
                PROMPT_INT8, stored, num_windows=what.kv_windows, int8_group=what.int8_group
            )
        )
    return variants
