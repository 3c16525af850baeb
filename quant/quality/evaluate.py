"""Measures a checkpoint against its base on text, with one layer in memory.

Weights are dequantized and arithmetic is float32, so the checkpoint is measured and not the
kernels. KV caches are compared with a float32 cache over the checkpoint's own weights.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from appliance.errors import QuantizeError
from appliance.quant.quality.predict import PredictionPass
from appliance.quant.quality.streams import BASE, CANDIDATE, ROUNDED, ModelVariant, Streams
from appliance.quant.quality.weight_sets import RoundedWeights, StoredWeights
from appliance.quant.run.evaluation_memory import EvaluationMemory
from appliance.quant.run.memory import MemoryUse
from appliance.runtime import release_unused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.kernels.kv_format import LayerPrecision
    from appliance.model.source import ModelSource
    from appliance.quant.quality.card import LayerError
    from appliance.quant.quality.measures import Divergence, Losses
    from appliance.quant.quality.predict import OnProgress
    from appliance.quant.text.held_out import Windows


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Measurements to make.

    Attributes:
        base: the model the candidate was made from; None measures only perplexity and KV caches.
        rounded: also measure the base rounded to nearest in the candidate's scheme.
        kv: a precision per layer for each cache, by name; see `kv_caches.caches_of`.
        kv_windows: number of windows to measure caches on; None is all.
        folder: for files of residual streams; None is the system's temporary folder.
        max_ram: limit of the process's memory in bytes; None takes what is free.
    """

    base: ModelSource | None = None
    rounded: bool = True
    kv: Mapping[str, tuple[LayerPrecision, ...]] = field(default_factory=dict)
    kv_windows: int | None = None
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
    """

    candidate: Losses
    against: Divergence | None
    rounded: Divergence | None
    layers: tuple[LayerError, ...]
    kv: dict[str, Divergence]


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
    """List the variants to run: the base first, KV caches last."""
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
    return variants
