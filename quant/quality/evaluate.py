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
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight
from appliance.kernels.soft_cap.reference import soft_cap
from appliance.quant.quality.measures import Divergence, Losses
from appliance.quant.quality.streams import ModelVariant, Streams
from appliance.quant.quality.vocabulary import Gap, Prediction
from appliance.quant.quality.weight_sets import RoundedWeights, StoredWeights
from appliance.quant.run.evaluation_memory import PLACES, EvaluationMemory
from appliance.quant.run.memory import MemoryUse
from appliance.runtime import release_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from appliance.kernels.kv_format import LayerPrecision
    from appliance.kernels.weight import Weight
    from appliance.model.norm import Norm
    from appliance.model.source import ModelSource
    from appliance.quant.quality.card import LayerError
    from appliance.quant.quality.weight_sets import WeightSet
    from appliance.quant.text.held_out import Windows

    OnProgress = Callable[[str, int, int], object]

BASE, CANDIDATE, ROUNDED = "base", "candidate", "rounded"


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
        found = _Heads(streams, variants, windows, what.device, memory).run(report)
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


class _Found:
    """The candidate's losses, and each variant's divergence from its reference."""

    def __init__(self, variants: Sequence[ModelVariant]) -> None:
        names = [variant.name for variant in variants]
        self.losses = Losses()
        self.pairs: dict[str, str] = {}  # variant -> its reference
        for name in names:
            if name in (CANDIDATE, ROUNDED) and BASE in names:
                self.pairs[name] = BASE
            elif name not in (BASE, CANDIDATE, ROUNDED):
                self.pairs[name] = CANDIDATE
        self.gaps = {name: Divergence() for name in self.pairs}


class _Heads:
    """Turns streams into predictions, one piece of the vocabulary at a time."""

    def __init__(
        self,
        streams: Streams,
        variants: list[ModelVariant],
        windows: Windows,
        device: torch.device,
        memory: EvaluationMemory,
    ) -> None:
        self._streams = streams
        self._variants = variants
        self._windows = windows
        self._device = device
        self._heads: dict[int, tuple[WeightSet, Weight, Norm]] = {}
        for weights in {id(v.weights): v.weights for v in variants}.values():
            norm = weights.norm(len(weights.source.spec.layers))
            self._heads[id(weights)] = weights, self._shared(weights.head()), norm
        self._entries = memory.entries_at_once(MemoryUse.now(device).ram)

    def run(self, report: OnProgress) -> _Found:
        found = _Found(self._variants)
        count = len(self._windows.tokens)
        for chosen in self._chunks():
            report("evaluating tokens", chosen.start, count)
            self._compare(chosen, found)
        report("evaluating tokens", count, count)
        return found

    def _shared(self, head: Weight) -> Weight:
        """Return an equal head that is in memory, if any: heads are as large as layers."""
        for _, other, _ in self._heads.values():
            if _equal(head, other):
                return other
        return head

    def _chunks(self) -> Iterator[range]:
        """Split windows into chunks that each variant runs completely or not at all."""
        count = len(self._windows.tokens)
        at_once = max(1, PLACES // self._windows.length)
        ends = sorted({count, *(v.num_windows or count for v in self._variants)})
        for start, end in zip([0, *ends], ends, strict=False):
            for first in range(start, end, at_once):
                yield range(first, min(first + at_once, end))

    def _compare(self, chosen: range, found: _Found) -> None:
        variants = [v for v in self._variants if v.num_windows is None or chosen[0] < v.num_windows]
        scored = [(window, self._windows.scored(window)) for window in chosen]
        tokens = self._windows.tokens
        targets = torch.cat([tokens[w, rows.start + 1 : rows.stop + 1] for w, rows in scored])
        targets = targets.to(self._device)
        predictions = {variant.name: Prediction(targets) for variant in variants}
        gaps = {
            v.name: Gap(predictions[found.pairs[v.name]], predictions[v.name])
            for v in variants
            if v.name in found.pairs
        }
        hidden = {
            v.name: torch.cat(
                [self._streams.hidden(v, w, rows, self._norm(v)) for w, rows in scored]
            )
            for v in variants
        }
        spec = self._variants[0].weights.source.spec
        for first in range(0, spec.vocab_size, self._entries):
            columns = slice(first, min(first + self._entries, spec.vocab_size))
            for weights, head, _ in self._heads.values():
                piece = weights.head_rows(head, columns)
                for variant in variants:
                    if variant.weights is weights:
                        logits = hidden[variant.name] @ piece.T * spec.logit_scale
                        logits = _capped(logits, spec.logit_softcap)
                        predictions[variant.name].add(logits, first)
            for gap in gaps.values():
                gap.add()
        places = {name: prediction.places() for name, prediction in predictions.items()}
        found.losses.add(places[CANDIDATE])
        for name, gap in gaps.items():
            found.gaps[name].add(places[found.pairs[name]], places[name], gap.klds())

    def _norm(self, variant: ModelVariant) -> Norm:
        return self._heads[id(variant.weights)][2]


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else soft_cap(logits, cap)


def _equal(head: Weight, other: Weight) -> bool:
    if isinstance(head, PackedWeight) and isinstance(other, PackedWeight):
        parts = ((head.codes, other.codes), (head.scale, other.scale), (head.offset, other.offset))
        return head.stacks_with(other) and all(torch.equal(a, b) for a, b in parts)
    if isinstance(head, GgmlWeight) and isinstance(other, GgmlWeight):
        return head.stacks_with(other) and torch.equal(head.blocks, other.blocks)
    if isinstance(head, Tensor) and isinstance(other, Tensor):
        return head.dtype == other.dtype and torch.equal(head, other)
    return False
