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
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role, layer_slots
from appliance.quant.formats.scheme import Fp4Scheme, Fp8Scheme, TrellisScheme, WeightScheme
from appliance.quant.methods import gptq, trellis
from appliance.quant.methods.awq import scale_inputs
from appliance.quant.walk.pieces import WeightPieces
from appliance.quant.walk.places import is_plain, linear_in, linear_of, row_places, stage_of
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.kernels.weights.weight import CodedWeight, Weight
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.scheme import GroupedScheme, LinearScheme
    from appliance.quant.run.options import Method, QuantizedWeight
    from appliance.quant.walk.block import Moments, ObservedLinear, TransformerBlock
    from appliance.quant.walk.routed_rows import RoutedRows
    from appliance.quant.walk.walk import Walk

    Keep: TypeAlias = Callable[[str, Weight], None]
    Done: TypeAlias = dict[str, CodedWeight]
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
    matters: Mapping[str, Tensor] | None = None,
) -> Iterator[QuantizedLayer]:
    """Quantize a model's layers in order; yield each once the rows have passed it.

    Args:
        walk: the calibration rows, having reached layer `first`.
        schemes: one per linear weight, by name; None keeps 16 bits.
        dtype: of stored scales, norms and unquantized tensors.
        keep: takes each tensor of a layer once, before the layer is yielded.
        first: the layer to begin with; an earlier run quantized those before it.
        matters: how much the outputs of a weight of a trellis count, by name; see `walk.slopes`.

    Raises:
        QuantizeError: activations are not finite; the message names the weight.
    """
    matters = matters or {}
    for index in range(first, len(source.spec.layers)):
        one = _quantize_layer if is_plain(source.spec.layers[index]) else quantize_any_layer
        yield one(source, walk, method, schemes, dtype, index, keep, matters)


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
    matters: Mapping[str, Tensor],
) -> QuantizedLayer:
    """Quantize one layer; nothing but the result outlives the call."""
    block = walk.block(index)
    parts, places = _parts(source, index), row_places(source, index)
    chosen = [[schemes[name] for name, _ in rows] for rows in parts]
    scales: list[Tensor | None] = [None] * len(chosen)
    if method.scales_inputs:
        moments = walk.observe(block, list(block.linears()))
        offset = source.spec.layers[index].norm.offset
        firsts = [_grouped(some[0]) for some in chosen]
        folded = scale_inputs(block, moments, firsts, dtype, offset)
        scaled = [number for number, scheme in enumerate(firsts) if scheme is not None]
        for number, found in zip(scaled, folded, strict=True):
            scales[number] = found.scales
        del moments
    for name, tensor in _norms_and_biases(source, index, block, parts, places).items():
        keep(name, tensor)
    losses: dict[str, float] = {}
    notes: list[str] = []
    for linear, rows, some, place in zip(block.linears(), parts, chosen, places, strict=True):
        hessian = None
        if any(scheme is not None for scheme in some):
            (seen,) = walk.observe(block, [linear])
            hessian = seen.hessian
            silent = int((hessian.diagonal() == 0).sum())
            if silent:
                notes.append(
                    f"{silent:,} of {linear.in_features:,} inputs of {_joined(rows)} were 0 in all"
                    " calibration text; their weights are rounded"
                )
            del seen
        for alike, scheme in _alike(rows, some):
            where = slice(alike[0][1].start, alike[-1][1].stop)
            whole: Tensor | PackedWeight | Fp4Weight | GgmlWeight | TrellisWeight
            held = where if place is None else place[where]
            whole = linear.weight[held]
            if scheme is not None:
                assert hessian is not None, "a scheme at least"
                name = _joined(alike)
                of_outputs = matters.get(name)
                whole, losses[name] = _quantize(
                    linear, held, hessian, scheme, method, dtype, name, of_outputs
                )
            if isinstance(whole, TrellisWeight):
                keep(alike[0][0], whole)
                continue
            for part, rows_of_part in alike:
                own = slice(rows_of_part.start - where.start, rows_of_part.stop - where.start)
                keep(part, whole[own] if isinstance(whole, Tensor) else whole.rows(own))
        del hessian
    walk.advance(block)
    return QuantizedLayer(index, losses, tuple(notes), tuple(scales))


def _joined(rows: list[tuple[str, slice]]) -> str:
    return " + ".join(name for name, _ in rows)


def _alike(
    rows: list[tuple[str, slice]], schemes: list[LinearScheme | None]
) -> Iterator[tuple[list[tuple[str, slice]], LinearScheme | None]]:
    """Yield neighbouring parts of a linear that have the same scheme.

    Each part of a trellis is alone: its rows cannot be taken apart afterwards.
    """
    pairs = zip(rows, schemes, strict=True)
    for scheme, some in groupby(pairs, key=lambda pair: pair[1]):
        together = [part for part, _ in some]
        alone = [[part] for part in together]
        for parts in alone if isinstance(scheme, TrellisScheme) else [together]:
            yield parts, scheme


def _quantize(
    linear: ObservedLinear,
    where: slice | Tensor,
    hessian: Tensor,
    scheme: LinearScheme,
    method: Method,
    dtype: torch.dtype,
    name: str,
    matters: Tensor | None,
) -> tuple[PackedWeight | Fp4Weight | GgmlWeight | TrellisWeight, float]:
    """Quantize rows of a linear by its current inputs; it then computes with the result.

    Returns:
        The weight and its loss.
    """
    original = linear.weight[where]
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizeError(f"the activations before {name} hold NaN or infinity")
    if not bool(torch.isfinite(original).all()):
        raise QuantizeError(f"{name} holds NaN or infinity; fetch the model again")
    packed = _coded(original, hessian, scheme, method, dtype, matters)
    assert not isinstance(packed, Fp8Weight), "FP8 needs no text"
    found = packed.dequantize().to(original.device)
    loss = gptq.output_loss(original, found, hessian)
    linear.weight[where] = found
    return packed, loss


def _coded(
    weight: Tensor,
    hessian: Tensor | None,
    scheme: LinearScheme,
    method: Method,
    dtype: torch.dtype,
    matters: Tensor | None,
) -> QuantizedWeight:
    """Quantize a weight; the outputs of a trellis share codes by how much each of them counts."""
    if matters is None or hessian is None or not isinstance(scheme, TrellisScheme):
        return method.quantizer(weight, hessian, scheme, dtype)
    return trellis.quantize(weight, hessian, scheme.bits, dtype, matters=matters.to(weight.device))


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


def _grouped(scheme: LinearScheme | None) -> GroupedScheme | None:
    assert not isinstance(scheme, Fp8Scheme | TrellisScheme), "its inputs are not scaled"
    return scheme


def _norms_and_biases(
    source: ModelSource,
    index: int,
    block: TransformerBlock,
    parts: list[list[tuple[str, slice]]],
    places: list[Tensor | None],
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
    for linear, rows, place in zip(block.linears(), parts, places, strict=True):
        if linear.bias is not None:
            bias = linear.bias if place is None else linear.bias[place]
            for name, where in rows:
                tensors[f"{name.removesuffix('.weight')}.bias"] = bias[where]
    return tensors


def quantize_any_layer(
    source: ModelSource,
    walk: Walk,
    method: Method,
    schemes: Mapping[str, LinearScheme | None],
    dtype: torch.dtype,
    index: int,
    keep: Keep,
    matters: Mapping[str, Tensor],
) -> QuantizedLayer:
    """Quantize one layer; arguments as for `calibrated.quantize_layers`.

    Raises:
        QuantizeError: activations or weights are not finite; the message names the weight.
    """
    return _LayerInWork(source, walk, method, schemes, dtype, index, keep, matters).quantized()


@dataclass(slots=True)
class _LayerInWork:
    source: ModelSource
    walk: Walk
    method: Method
    schemes: Mapping[str, LinearScheme | None]
    dtype: torch.dtype
    index: int
    keep: Keep
    matters: Mapping[str, Tensor]
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

    def _quantize(self, slot: TensorSlot, moments: Moments | None) -> CodedWeight:
        weight, scheme = self._read(slot), self.schemes[slot.name]
        assert isinstance(scheme, WeightScheme | TrellisScheme | Fp4Scheme), (
            "K types have plain layers"
        )
        hessian = None
        if moments is None:
            self.unseen.append(slot)
        else:
            hessian = moments.hessian
            weight = weight.to(hessian.device)
            if not bool(torch.isfinite(hessian).all()):
                raise QuantizeError(f"the activations before {slot.name} hold NaN or infinity")
        matters = self.matters.get(slot.name)
        packed = _coded(weight, hessian, scheme, self.method, self.dtype, matters)
        assert isinstance(packed, PackedWeight | TrellisWeight | Fp4Weight), (
            "of a scheme of its own"
        )
        if hessian is not None:
            loss = gptq.output_loss(weight, packed.dequantize().to(weight.device), hessian)
            self.losses[slot.name] = loss
        return packed

    def _read(self, slot: TensorSlot) -> torch.Tensor:
        return WeightPieces(self.source.weights, slot.name).rows(slice(0, slot.shape[0]))


def _notes(index: int, unseen: list[TensorSlot]) -> Iterator[str]:
    experts = sorted({slot.expert for slot in unseen if slot.expert is not None})
    if experts:
        which = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        yield (
            f"layer {index}: no calibration text came to {counted(len(experts), 'expert')} "
            f"({which}); their weights are rounded"
        )
