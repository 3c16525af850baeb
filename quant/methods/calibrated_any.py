"""Runs GPTQ and AWQ's ranges over a layer of any kind: experts, recurrent mixers, latents.

In stages: text passes through the layer, each weight of the stage is quantized by its linear's
inputs, and the next stage sees the results. Routed experts follow one after another, each on the
rows that chose it, so that memory holds one of them. Inputs are not scaled as in AWQ, since nothing
before experts or a state could absorb the inverse scales; but AWQ's ranges are chosen by the
inputs' energy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch

from appliance.errors import QuantizeError
from appliance.kernels.packed import PackedWeight
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import layer_slots
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import gptq, rtn
from appliance.quant.methods.quantized_layer import QuantizedLayer
from appliance.quant.methods.ranges import SHRUNK, choose_steps
from appliance.quant.walk.pieces import WeightPieces
from appliance.quant.walk.places import linear_in, linear_of, stage_of
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.methods.quantized_layer import Keep
    from appliance.quant.run.options import Method
    from appliance.quant.walk.block import Moments
    from appliance.quant.walk.routed_rows import RoutedRows
    from appliance.quant.walk.walk import Walk

    Done: TypeAlias = dict[str, PackedWeight]
    # The moments of a weight's inputs while other weights are quantized; None without inputs.
    Observe: TypeAlias = Callable[[TensorSlot, Done], Moments | None]


def quantize_any_layer(
    source: ModelSource,
    walk: Walk,
    method: Method,
    schemes: Mapping[str, LinearScheme | None],
    dtype: torch.dtype,
    index: int,
    keep: Keep,
) -> QuantizedLayer:
    """Quantize one layer; arguments as for `calibrated.quantize_layers`.

    Raises:
        QuantizeError: activations or weights are not finite; the message names the weight.
    """
    return _LayerInWork(source, walk, method, schemes, dtype, index, keep).quantized()


@dataclass(slots=True)
class _LayerInWork:
    source: ModelSource
    walk: Walk
    method: Method
    schemes: Mapping[str, LinearScheme | None]
    dtype: torch.dtype
    index: int
    keep: Keep
    losses: dict[str, float] = field(default_factory=dict)
    unseen: list[TensorSlot] = field(default_factory=list)

    def quantized(self) -> QuantizedLayer:
        by_expert: dict[int | None, list[TensorSlot]] = {}
        for slot in layer_slots(self.source.spec, self.source.family.names, self.index):
            if self.schemes.get(slot.name) is None:
                self.keep(slot.name, self._read(slot))
            else:
                by_expert.setdefault(slot.expert, []).append(slot)
        done = self._in_stages(by_expert.get(None, []), self._observe_layer)
        mlp = self.source.spec.layers[self.index].mlp
        if isinstance(mlp, ExpertsSpec):
            with self.walk.routed(self.index, done) as rows:
                for number in mlp.experts:
                    self._quantize_expert(number, by_expert.get(number, []), rows)
                self.walk.advance(self.walk.layer(self.index, done, rows.summed()))
        else:
            self.walk.advance(self.walk.layer(self.index, done))
        notes = tuple(_notes(self.index, self.unseen))
        return QuantizedLayer(self.index, self.losses, notes)

    def _quantize_expert(self, number: int, slots: list[TensorSlot], rows: RoutedRows) -> None:
        def observe(slot: TensorSlot, done: Done) -> Moments | None:
            if not rows.is_chosen(number):
                return None
            mlp = self.walk.expert(self.index, number, done)
            return rows.observe(number, mlp, linear_in(slot, mlp))

        done = self._in_stages(slots, observe)
        if rows.is_chosen(number):
            rows.add(number, self.walk.expert(self.index, number, done))

    def _observe_layer(self, slot: TensorSlot, done: Done) -> Moments:
        block = self.walk.layer(self.index, done)
        linear = linear_of(slot, block.layer, self.source.family.names)
        (moments,) = self.walk.observe(block, [linear])
        return moments

    def _in_stages(self, slots: list[TensorSlot], observe: Observe) -> Done:
        done: Done = {}
        stages: dict[int, list[TensorSlot]] = {}
        for slot in slots:
            stages.setdefault(stage_of(slot, self.source.family.names), []).append(slot)
        for _, together in sorted(stages.items()):
            done |= self._quantize_stage(together, observe, done)
        return done

    def _quantize_stage(self, slots: list[TensorSlot], observe: Observe, before: Done) -> Done:
        """Quantize weights with one input."""
        moments = observe(slots[0], before)
        done = {slot.name: self._quantize(slot, moments) for slot in slots}
        for name, weight in done.items():
            self.keep(name, weight)
        return done

    def _quantize(self, slot: TensorSlot, moments: Moments | None) -> PackedWeight:
        weight, scheme = self._read(slot), _scheme(self.schemes[slot.name])
        if moments is None:
            self.unseen.append(slot)
            return rtn.quantize(weight, scheme, self.dtype)
        hessian = moments.hessian
        weight = weight.to(hessian.device)
        if not bool(torch.isfinite(hessian).all()):
            raise QuantizeError(f"the activations before {slot.name} hold NaN or infinity")
        if self.method.makes_up:
            result = gptq.quantize(weight, hessian, scheme, self.dtype)
            assert isinstance(result.weight, PackedWeight), "of a scheme of its own"
            self.losses[slot.name] = result.loss
            return result.weight
        importance = hessian.diagonal()
        steps = choose_steps(weight, scheme, self.dtype, importance=importance, shares=SHRUNK)
        packed = steps.pack(steps.codes(weight))
        self.losses[slot.name] = gptq.output_loss(weight, packed.dequantize(), hessian)
        return packed

    def _read(self, slot: TensorSlot) -> torch.Tensor:
        return WeightPieces(self.source.weights, slot.name).rows(slice(0, slot.shape[0]))


def _scheme(scheme: LinearScheme | None) -> WeightScheme:
    assert isinstance(scheme, WeightScheme), "FP8 needs no text, and K types have plain layers"
    return scheme


def _notes(index: int, unseen: list[TensorSlot]) -> Iterator[str]:
    experts = sorted({slot.expert for slot in unseen if slot.expert is not None})
    if experts:
        which = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        yield (
            f"layer {index}: no calibration text came to {counted(len(experts), 'expert')} "
            f"({which}); their weights are rounded"
        )
