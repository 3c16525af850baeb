"""Runs GPTQ and AWQ's ranges over a layer of any kind: experts, recurrent mixers, latents.

In stages: text passes through the layer, each weight of the stage is quantized by its linear's
inputs, and the next stage sees the results. Inputs are not scaled as in AWQ, since nothing before
experts or a state could absorb the inverse scales; but AWQ's ranges are chosen by the inputs'
energy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import QuantizeError
from appliance.kernels.packed import PackedWeight
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import gptq, rtn
from appliance.quant.methods.quantized_layer import QuantizedLayer
from appliance.quant.methods.ranges import SHRUNK, choose_steps
from appliance.quant.walk.pieces import WeightPieces
from appliance.quant.walk.places import linear_of, stage_of
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.ggml import GgmlWeight
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot
    from appliance.quant.formats.scheme import LinearScheme
    from appliance.quant.run.options import Method
    from appliance.quant.walk.block import Moments
    from appliance.quant.walk.walk import Walk

MOMENT_BYTES = 512 << 20  # of second moments at once; more experts need more passes


def quantize_any_layer(
    source: ModelSource,
    walk: Walk,
    method: Method,
    schemes: Mapping[str, LinearScheme | None],
    dtype: torch.dtype,
    index: int,
) -> QuantizedLayer:
    """Quantize one layer; arguments as for `calibrated.quantize_layers`.

    Raises:
        QuantizeError: activations or weights are not finite; the message names the weight.
    """
    slots = [slot for slot in source.slots() if slot.layer == index]
    chosen = [slot for slot in slots if schemes.get(slot.name) is not None]
    names = source.family.names
    done: dict[str, PackedWeight] = {}
    losses: dict[str, float] = {}
    unseen: list[TensorSlot] = []
    for stage in sorted({stage_of(slot, names) for slot in chosen}):
        block = walk.layer(index, done)
        of_stage: dict[str, PackedWeight] = {}
        together = [slot for slot in chosen if stage_of(slot, names) == stage]
        for some in _by_memory(together):
            linears = {slot.name: linear_of(slot, block.layer, names) for slot in some}
            distinct = list({id(linear): linear for linear in linears.values()}.values())
            seen = dict(
                zip(map(id, distinct), walk.observe(block, distinct, to_end=True), strict=True)
            )
            for slot in some:
                moments = seen[id(linears[slot.name])]
                scheme = _scheme(schemes[slot.name])
                weight, loss = _quantize(source, slot, moments, scheme, method, dtype)
                of_stage[slot.name] = weight
                if loss is None:
                    unseen.append(slot)
                else:
                    losses[slot.name] = loss
        done |= of_stage
    tensors: dict[str, Tensor | PackedWeight | GgmlWeight] = {
        slot.name: WeightPieces(source.weights, slot.name).rows(slice(0, slot.shape[0]))
        for slot in slots
        if slot.name not in done
    }
    walk.advance(walk.layer(index, done))
    tensors.update(done)
    return QuantizedLayer(index, tensors, losses, tuple(_notes(index, unseen)))


def _by_memory(slots: Sequence[TensorSlot]) -> Iterator[list[TensorSlot]]:
    """Split a stage's weights so that the moments of each part fit; experts stay whole."""
    groups: dict[int | None, list[TensorSlot]] = {}
    for slot in slots:
        groups.setdefault(slot.expert, []).append(slot)
    part: list[TensorSlot] = []
    size = 0
    for group in groups.values():
        added = 4 * group[0].shape[1] ** 2
        if part and size + added > MOMENT_BYTES:
            yield part
            part, size = [], 0
        part, size = [*part, *group], size + added
    yield part


def _quantize(
    source: ModelSource,
    slot: TensorSlot,
    moments: Moments,
    scheme: WeightScheme,
    method: Method,
    dtype: torch.dtype,
) -> tuple[PackedWeight, float | None]:
    """Quantize a weight by its linear's inputs; the loss is None if it had none."""
    weight = WeightPieces(source.weights, slot.name).rows(slice(0, slot.shape[0]))
    weight = weight.to(moments.hessian.device)
    if not moments.tokens:
        return rtn.quantize(weight, scheme, dtype), None
    hessian = moments.hessian
    if not bool(torch.isfinite(hessian).all()):
        raise QuantizeError(f"the activations before {slot.name} hold NaN or infinity")
    if method.makes_up:
        result = gptq.quantize(weight, hessian, scheme, dtype)
        assert isinstance(result.weight, PackedWeight), "of a scheme of its own"
        return result.weight, result.loss
    steps = choose_steps(weight, scheme, dtype, importance=hessian.diagonal(), shares=SHRUNK)
    packed = steps.pack(steps.codes(weight))
    return packed, gptq.output_loss(weight, packed.dequantize(), hessian)


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
