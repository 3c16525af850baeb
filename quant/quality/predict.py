"""Turns the streams of a model's variants into predictions, and compares them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.kernels.soft_cap.reference import soft_cap
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.quant.quality.measures import Divergence, Gap, Losses, Prediction
from appliance.quant.quality.streams import BASE, CANDIDATE, ROUNDED, ModelVariant, Streams
from appliance.quant.run.evaluation_memory import PLACES, EvaluationMemory
from appliance.quant.run.memory import MemoryUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from appliance.kernels.weights.weight import Weight
    from appliance.model.norm import Norm
    from appliance.quant.quality.weight_sets import WeightSet
    from appliance.quant.text.held_out import Windows

    OnProgress = Callable[[str, int, int], object]


class Compared:
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


class PredictionPass:
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

    def run(self, report: OnProgress) -> Compared:
        found = Compared(self._variants)
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

    def _compare(self, chosen: range, found: Compared) -> None:
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
                piece, bias = weights.head_rows(head, columns), weights.head_bias()
                for variant in variants:
                    if variant.weights is weights:
                        logits = hidden[variant.name] @ piece.T
                        if bias is not None:
                            logits += bias[columns]
                        logits = _capped(logits * spec.logit_scale, spec.logit_softcap)
                        predictions[variant.name].add(logits, first)
            for gap in gaps.values():
                gap.add()
        places = {name: prediction.places() for name, prediction in predictions.items()}
        klds = {name: gap.klds() for name, gap in gaps.items()}
        start = 0
        for _, scored_places in scored:
            window = slice(start, start := start + scored_places.stop - scored_places.start)
            found.losses.add(places[CANDIDATE].part(window))
            for name, values in klds.items():
                of_base, of_variant = places[found.pairs[name]], places[name]
                found.gaps[name].add(of_base.part(window), of_variant.part(window), values[window])

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
