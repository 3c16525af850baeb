"""Lays out the mixers of recurrent layers for the CPU library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.cpu.structs import (
    FiltersStruct,
    GatedDeltaStruct,
    LinearStruct,
    Mamba2Struct,
    ShortConvStruct,
)
from appliance.model.layer_weights import GatedDeltaWeights, Mamba2Weights, ShortConvWeights
from appliance.model.linear import stack_neighbours
from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, SplitGroup

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cpu.structs import LayerStruct
    from appliance.kernels.cpu.weights import WeightPacker
    from appliance.model.layer_weights import MixerWeights
    from appliance.model.recurrent_spec import RecurrentSpec


def lay_out_recurrent(
    packer: WeightPacker,
    struct: LayerStruct,
    weights: MixerWeights,
    spec: RecurrentSpec,
    state: tuple[int, ...],
) -> None:
    """Lay out a mixer into its layer's struct; its tensors are at `state` in a slot."""
    if isinstance(weights, ShortConvWeights):
        struct.short_conv = _lay_out_short_conv(packer, weights, state)
    elif isinstance(weights, GatedDeltaWeights):
        assert isinstance(spec, GatedDeltaSpec)
        struct.gated_delta = _lay_out_gated_delta(packer, weights, spec, state)
    else:
        assert isinstance(weights, Mamba2Weights)
        assert isinstance(spec, Mamba2Spec)
        struct.mamba2 = _lay_out_mamba2(packer, weights, spec, state)


def _lay_out_short_conv(
    packer: WeightPacker, weights: ShortConvWeights, state: tuple[int, ...]
) -> int:
    """Lay out a short convolution with tensors at `state` in a slot.

    Returns:
        Address of its struct in the arena.
    """
    (inputs,) = stack_neighbours(weights.inputs)
    struct = ShortConvStruct(
        filters=_filters(packer, weights.filters, weights.bias, state[0]),
        input=packer.linear(inputs.weight, inputs.bias),
        output=packer.linear(weights.output.weight, weights.output.bias),
    )
    return packer.structs(ShortConvStruct, [struct])


def _lay_out_gated_delta(
    packer: WeightPacker, weights: GatedDeltaWeights, spec: GatedDeltaSpec, state: tuple[int, ...]
) -> int:
    """Lay out Gated DeltaNet, as `_lay_out_short_conv` does."""
    inputs = stack_neighbours(weights.inputs)
    tail, maps = state
    struct = GatedDeltaStruct(
        num_key_heads=spec.num_key_heads,
        num_value_heads=spec.num_value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        num_inputs=len(inputs),
        filters=_filters(packer, weights.filters, None, tail),
        inputs=(LinearStruct * 4)(*(packer.linear(part.weight, part.bias) for part in inputs)),
        output=packer.linear(weights.output.weight),
        norm=packer.norm(weights.norm.weight, weights.norm.eps),
        rates=packer.floats(weights.rates),
        decay_bias=packer.floats(weights.decay_bias),
        state=maps,
    )
    return packer.structs(GatedDeltaStruct, [struct])


def _lay_out_mamba2(
    packer: WeightPacker, weights: Mamba2Weights, spec: Mamba2Spec, state: tuple[int, ...]
) -> int:
    """Lay out Mamba-2, as `_lay_out_short_conv` does."""
    (inputs,) = stack_neighbours(weights.inputs)
    tail, maps = state
    split = spec.split or SplitGroup(0, 0, 0)
    struct = Mamba2Struct(
        num_heads=spec.num_heads,
        num_groups=spec.num_groups,
        head_dim=spec.head_dim,
        state_dim=spec.state_dim,
        split_groups=split.count,
        split_group=split.index,
        split_width=split.width,
        filters=_filters(packer, weights.filters, weights.filter_bias, tail),
        input=packer.linear(inputs.weight, inputs.bias),
        output=packer.linear(weights.output.weight, weights.output.bias),
        norm=packer.norm(weights.norm.weight, weights.norm.eps),
        step_bias=packer.floats(weights.step_bias),
        rates=packer.floats(weights.rates),
        skip=packer.floats(weights.skip),
        state=maps,
    )
    return packer.structs(Mamba2Struct, [struct])


def _filters(
    packer: WeightPacker, filters: Tensor, bias: Tensor | None, state: int
) -> FiltersStruct:
    width, taps = filters.shape
    return FiltersStruct(
        width=width,
        taps=taps,
        filters=packer.floats(filters.T),
        bias=None if bias is None else packer.floats(bias),
        state=state,
    )
