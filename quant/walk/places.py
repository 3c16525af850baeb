"""Finds a weight's linear and its order of use in a layer of any kind.

Weights of one stage can be quantized in the same pass of text: none changes another's input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import QuantizeError
from appliance.model.attention import Attention, LatentAttention
from appliance.model.experts import Experts
from appliance.model.layers import ActivatedLinear, GatedLinear
from appliance.model.row_orders import joined_rows
from appliance.model.spec import AttentionSpec, MLPSpec
from appliance.model.tensors import Role
from appliance.quant.walk.block import ObservedLinear

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.model.layers import MLP, DecoderLayer
    from appliance.model.names import TensorNames
    from appliance.model.source import ModelSource
    from appliance.model.spec import LayerSpec
    from appliance.model.tensors import TensorSlot

_INTO_MIXER = (Role.QUERY, Role.KEY, Role.VALUE, Role.QKV, Role.INPUT)
_INTO_MLP = (Role.GATE, Role.UP, Role.GATE_UP)


def is_plain(layer: LayerSpec) -> bool:
    """Return True for attention and a gated MLP whose inputs can be scaled."""
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, AttentionSpec) or not isinstance(mlp, MLPSpec) or not mlp.gated:
        return False
    gated = mixer.output_gate or mixer.head_gates
    changed = gated or mixer.value_norm is not None or mixer.keys_are_values
    return not (changed or layer.norm.centered or layer.parallel)


def row_places(source: ModelSource, index: int) -> list[Tensor | None]:
    """Return where a plain layer's four linears have each stored row; None where it is stored.

    Returns:
        One (out_features,) int64 for each of `names.linears`, whose rows are stored in turn.
    """
    mixer = source.spec.layers[index].mixer
    assert isinstance(mixer, AttentionSpec), "of plain layers"
    num_rows = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
    order = joined_rows(mixer, source.family.names, num_rows)
    return [None if order is None else torch.from_numpy(order.argsort()), None, None, None]


def stage_of(slot: TensorSlot, names: TensorNames) -> int:
    """Return a weight's stage, from 0 in the order of use."""
    if _makes_heads(slot, names):
        return 1
    if slot.role in _INTO_MIXER:
        return 0
    if slot.role is Role.OUTPUT:
        return 2
    if slot.role in _INTO_MLP:
        return 3
    assert slot.role is Role.DOWN, slot
    return 4


def linear_of(slot: TensorSlot, layer: DecoderLayer, names: TensorNames) -> ObservedLinear:
    """Return the linear that holds a weight outside the routed experts."""
    mixer = layer.mixer
    if slot.role is Role.OUTPUT:
        assert mixer is not None
        return _observed(mixer.output)
    if slot.role in _INTO_MIXER:
        if isinstance(mixer, LatentAttention) and _makes_heads(slot, names):
            return _observed(mixer.queries)
        assert mixer is not None
        return _observed(mixer.qkv if isinstance(mixer, Attention) else mixer.inputs)
    mlp = layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp
    assert mlp is not None
    return linear_in(slot, mlp)


def linear_in(slot: TensorSlot, mlp: MLP) -> ObservedLinear:
    """Return the linear of an MLP or expert that holds a weight."""
    if slot.role is Role.DOWN:
        return _observed(mlp.down)
    if isinstance(mlp.middle, ActivatedLinear):
        return _observed(mlp.middle.up)
    assert isinstance(mlp.middle, GatedLinear)
    return _observed(mlp.middle.gate_up)


def _makes_heads(slot: TensorSlot, names: TensorNames) -> bool:
    """Return True for latent attention's up projection of queries."""
    return slot.role is Role.QUERY and slot.name.endswith(f".{names.latent.query_up}.weight")


def _observed(linear: object) -> ObservedLinear:
    assert isinstance(linear, ObservedLinear), linear
    return linear


def check_walked(source: ModelSource, lost: str) -> None:
    """Refuse a model whose layers cannot be run one by one.

    Args:
        lost: what the user does not get, such as "no quality card of it".

    Raises:
        QuantizeError: transformers' modules execute the model.
    """
    if source.fallback is not None:
        raise QuantizeError(
            f"{source.path.name}: transformers' modules execute {source.fallback.name}, and no"
            f" code here runs its layers one by one, so there is {lost}"
        )
