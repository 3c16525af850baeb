"""Runs a method over a model's layers, each on the outputs of the quantized ones before it.

Per layer: read the weights, observe them on the calibration rows, quantize and hand each on to be
written, then pass the rows through the stored result. A layer of experts, recurrent mixers or
latents goes in stages: text passes through the layer, each weight of the stage is quantized by its
linear's inputs, and the next stage sees the results. Routed experts follow one after another, each
on the rows that chose it, so that memory holds one of them. Their inputs are not scaled as in AWQ,
since nothing before experts or a state could absorb the inverse scales.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role, layer_slots
from appliance.quant.formats.scheme import Fp8Scheme, WeightScheme
from appliance.quant.methods import gptq, rtn
from appliance.quant.methods.awq import scale_inputs
from appliance.quant.walk.pieces import WeightPieces
from appliance.quant.walk.places import is_plain, linear_in, linear_of, stage_of
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.kernels.weights.ggml import GgmlWeight

    Keep: TypeAlias = Callable[[str, Tensor | PackedWeight | GgmlWeight], None]
    from collections.abc import Callable, Iterator, Mapping

    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.scheme import GroupedScheme, LinearScheme
    from appliance.quant.run.options import Method
    from appliance.quant.walk.block import Moments, ObservedLinear, TransformerBlock
    from appliance.quant.walk.routed_rows import RoutedRows
    from appliance.quant.walk.walk import Walk

    Done: TypeAlias = dict[str, PackedWeight]
    Observe: TypeAlias = Callable[[TensorSlot, Done], Moments | None]


def quantize_layers(
    source: ModelSource,
    walk: Walk,
    method: Method,
    schemes: Mapping[str, LinearScheme | None],
    dtype: torch.dtype,
    keep: Keep,
    *,
    first: int = 0,
) -> Iterator[QuantizedLayer]:
    """Quantize a model's layers in order; yield each once the rows have passed it.

    Args:
        walk: the calibration rows, having reached layer `first`.
        schemes: one per linear weight, by name; None keeps 16 bits.
        dtype: of stored scales, norms and unquantized tensors.
        keep: takes each tensor of a layer once, before the layer is yielded.
        first: the layer to begin with; an earlier run quantized those before it.

    Raises:
        QuantizeError: activations are not finite; the message names the weight.
    """
    for index in range(first, len(source.spec.layers)):
        one = _quantize_layer if is_plain(source.spec.layers[index]) else quantize_any_layer
        yield one(source, walk, method, schemes, dtype, index, keep)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The result of one layer besides its tensors.

    Attributes:
        losses: of each quantized linear's outputs, as a share of their energy.
        scales: divisors of the inputs of the layer's four linears; None if not scaled.
    """

    index: int
    losses: dict[str, float]
    notes: tuple[str, ...] = ()
    scales: tuple[Tensor | None, ...] = ()


def _quantize_layer(
    source: ModelSource,
    walk: Walk,
    method: Method,
    schemes: Mapping[str, LinearScheme | None],
    dtype: torch.dtype,
    index: int,
    keep: Keep,
) -> QuantizedLayer:
    """Quantize one layer; nothing but the result outlives the call."""
    block = walk.block(index)
    parts = _parts(source, index)
    chosen = [_scheme(schemes, [name for name, _ in rows]) for rows in parts]
    scales: list[Tensor | None] = [None] * len(chosen)
    if method.scales_inputs:
        moments = walk.observe(block, list(block.linears()))
        offset = source.spec.layers[index].norm.offset
        folded = scale_inputs(block, moments, chosen, dtype, offset)
        places = [place for place, scheme in enumerate(chosen) if scheme is not None]
        for place, found in zip(places, folded, strict=True):
            scales[place] = found.scales
        del moments
    for name, tensor in _norms_and_biases(source, index, block, parts).items():
        keep(name, tensor)
    losses: dict[str, float] = {}
    notes: list[str] = []
    for linear, rows, scheme in zip(block.linears(), parts, chosen, strict=True):
        name = " + ".join(name for name, _ in rows)
        whole: Tensor | PackedWeight | GgmlWeight = linear.weight
        if scheme is not None:
            whole, losses[name], silent = _quantize(
                walk, block, linear, scheme, method, dtype, name
            )
            if silent:
                notes.append(
                    f"{silent:,} of {linear.in_features:,} inputs of {name} were 0 in all"
                    " calibration text; their weights are rounded"
                )
        for part, where in rows:
            keep(part, whole[where] if isinstance(whole, Tensor) else whole.rows(where))
    walk.advance(block)
    return QuantizedLayer(index, losses, tuple(notes), tuple(scales))


def _quantize(
    walk: Walk,
    block: TransformerBlock,
    linear: ObservedLinear,
    scheme: GroupedScheme,
    method: Method,
    dtype: torch.dtype,
    name: str,
) -> tuple[PackedWeight | GgmlWeight, float, int]:
    """Quantize a linear by its current inputs; it then computes with the result.

    Returns:
        The weight, its loss, and the number of inputs that were always 0.
    """
    (seen,) = walk.observe(block, [linear])
    hessian = seen.hessian
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizeError(f"the activations before {name} hold NaN or infinity")
    if not bool(torch.isfinite(linear.weight).all()):
        raise QuantizeError(f"{name} holds NaN or infinity; fetch the model again")
    original = linear.weight
    packed = method.quantizer(original, hessian, scheme, dtype)
    assert not isinstance(packed, Fp8Weight), "FP8 needs no text"
    linear.weight = packed.dequantize()
    loss = gptq.output_loss(original, linear.weight, hessian)
    return packed, loss, int((hessian.diagonal() == 0).sum())


def _parts(source: ModelSource, index: int) -> list[list[tuple[str, slice]]]:
    lengths = {slot.name: slot.shape[0] for slot in source.slots()}
    found = []
    for stored in source.family.names.linears(index):
        start, linear = 0, []
        for name in stored:
            end = start + lengths[name]
            linear.append((name, slice(start, end)))
            start = end
        found.append(linear)
    return found


def _scheme(schemes: Mapping[str, LinearScheme | None], names: list[str]) -> GroupedScheme | None:
    found = {schemes[name] for name in names}
    assert len(found) == 1, f"{names} share an input and so a scheme"
    scheme = found.pop()
    assert not isinstance(scheme, Fp8Scheme), "FP8 needs no text"
    return scheme


def _norms_and_biases(
    source: ModelSource, index: int, block: TransformerBlock, parts: list[list[tuple[str, slice]]]
) -> dict[str, Tensor]:
    """Return a layer's tensors besides linear weights, as stored, with folded scales."""
    names, offset = source.family.names, source.spec.layers[index].norm.offset
    tensors = {
        slot.name: WeightPieces(source.weights, slot.name).rows(slice(0, slot.shape[0]))
        for slot in source.slots()
        if slot.layer == index and slot.role is Role.NORM
    }
    for part, norm in (
        (names.mixer_norm, block.mixer_norm),
        (names.mlp_norm, block.mlp_norm),
    ):
        tensors[f"{names.in_layer(index, part)}.weight"] = norm.weight - offset
    for linear, rows in zip(block.linears(), parts, strict=True):
        if linear.bias is not None:
            for name, where in rows:
                tensors[f"{name.removesuffix('.weight')}.bias"] = linear.bias[where]
    return tensors


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
        weight, scheme = self._read(slot), _integer_scheme(self.schemes[slot.name])
        if moments is None:
            self.unseen.append(slot)
            return rtn.quantize(weight, scheme, self.dtype)
        hessian = moments.hessian
        weight = weight.to(hessian.device)
        if not bool(torch.isfinite(hessian).all()):
            raise QuantizeError(f"the activations before {slot.name} hold NaN or infinity")
        packed = self.method.quantizer(weight, hessian, scheme, self.dtype)
        assert isinstance(packed, PackedWeight), "of a scheme of its own"
        self.losses[slot.name] = gptq.output_loss(weight, packed.dequantize(), hessian)
        return packed

    def _read(self, slot: TensorSlot) -> torch.Tensor:
        return WeightPieces(self.source.weights, slot.name).rows(slice(0, slot.shape[0]))


def _integer_scheme(scheme: LinearScheme | None) -> WeightScheme:
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
