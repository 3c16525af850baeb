"""Runs GPTQ and AWQ over a model, each layer on the outputs of the quantized ones before it.

Per layer: read the weights, observe them on the calibration rows, quantize and hand each on to be
written, then pass the rows through the stored result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import QuantizeError
from appliance.model.tensors import Role
from appliance.quant.formats.scheme import Fp8Scheme
from appliance.quant.methods import gptq
from appliance.quant.methods.calibrated_any import quantize_any_layer
from appliance.quant.methods.fold import scale_inputs
from appliance.quant.methods.quantized_layer import QuantizedLayer
from appliance.quant.methods.ranges import SHRUNK, choose_grid
from appliance.quant.walk.pieces import WeightPieces
from appliance.quant.walk.places import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from appliance.kernels.ggml import GgmlWeight
    from appliance.kernels.packed import PackedWeight
    from appliance.model.source import ModelSource
    from appliance.quant.formats.scheme import GroupedScheme, LinearScheme
    from appliance.quant.methods.quantized_layer import Keep
    from appliance.quant.run.options import Method
    from appliance.quant.walk.block import ObservedLinear, TransformerBlock
    from appliance.quant.walk.walk import Walk


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
    if method.makes_up:
        result = gptq.quantize(original, hessian, scheme, dtype)
        packed, loss = result.weight, result.loss
        linear.weight = packed.dequantize()
    else:
        steps = choose_grid(original, scheme, dtype, importance=hessian.diagonal(), shares=SHRUNK)
        packed = steps.pack(steps.codes(original))
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
