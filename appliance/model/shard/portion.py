"""Counts the part of each tensor that a rank holds, from the tensor's role alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.model.recurrent_spec import Mamba2Spec, ShortConvSpec
from appliance.model.shard.split import Heads, channel_ranges, head_counts, input_ranges
from appliance.model.spec import AttentionSpec, ExpertsSpec, LatentAttentionSpec, MLPSpec
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from appliance.model.shard.shard import Shard
    from appliance.model.shard.split import Columns, LayerShare
    from appliance.model.spec import LayerSpec, MixerSpec
    from appliance.model.tensors import TensorSlot

OF_MLP = (Role.DOWN, Role.GATE, Role.UP, Role.GATE_UP)


def portion(shard: Shard, slot: TensorSlot) -> float:
    """Return the part of a tensor that a rank holds, at most 1."""
    if slot.layer is None:
        own = shard.own_tokens
        is_cut = slot.role in (Role.EMBEDDING, Role.HEAD)
        return (own.stop - own.start) / shard.whole.vocab_size if is_cut else 1
    return layer_portion(shard.whole.layers[slot.layer], shard.shares[slot.layer], slot)


def layer_portion(layer: LayerSpec, share: LayerShare, slot: TensorSlot) -> float:
    """Return the part of a layer's tensor that a rank holds, at most 1."""
    if slot.role in OF_MLP:
        return _mlp_portion(layer, share, slot)
    if share.heads is None or layer.mixer is None:
        return 1
    return _mixer_portion(layer.mixer, share.heads, slot)


def kept_portion(mixer: MixerSpec, heads: Heads) -> float:
    """Return the part of a token's keys and values that a rank caches."""
    assert isinstance(mixer, AttentionSpec | LatentAttentionSpec)
    return heads.num_kv / mixer.num_kv_heads


def _mlp_portion(layer: LayerSpec, share: LayerShare, slot: TensorSlot) -> float:
    mlp = layer.mlp
    assert isinstance(mlp, MLPSpec | ExpertsSpec)
    if isinstance(mlp, ExpertsSpec) and slot.expert is None:
        assert mlp.shared is not None
        return _part_of(mlp.shared.intermediate_size, share.shared)
    if share.experts is not None:
        return float(slot.expert in share.experts)
    return _part_of(mlp.intermediate_size, share.columns)


def _part_of(width: int, columns: Columns | None) -> float:
    return 1 if columns is None else (columns[1] - columns[0]) / width


def _mixer_portion(mixer: MixerSpec, heads: Heads, slot: TensorSlot) -> float:
    own = heads.count / _num_heads(mixer)
    match slot.role:
        case Role.KEY | Role.VALUE:
            return kept_portion(mixer, heads)
        case Role.QUERY if isinstance(mixer, LatentAttentionSpec):
            return 1 if slot.shape[0] == mixer.query_rank else own
        case Role.INPUT:
            every = Heads(0, _num_heads(mixer), 0, _num_groups(mixer))
            return _width(input_ranges(mixer, heads)) / _width(input_ranges(mixer, every))
        case Role.FILTER:
            assert not isinstance(mixer, AttentionSpec | LatentAttentionSpec)
            return _width(channel_ranges(mixer, heads)) / slot.shape[0]
        case Role.HEAD_NORM:  # of each head, or of all side by side
            return own if isinstance(mixer, Mamba2Spec) else 1
        case Role.QUERY | Role.QKV | Role.OUTPUT | Role.LATENT_HEADS | Role.RATE | Role.HEAD_GATES:
            return own
        case _:
            return 1


def _num_heads(mixer: MixerSpec) -> int:
    return mixer.width if isinstance(mixer, ShortConvSpec) else head_counts(mixer)[0]


def _num_groups(mixer: MixerSpec) -> int:
    return mixer.width if isinstance(mixer, ShortConvSpec) else head_counts(mixer)[1]


def _width(ranges: list[Columns]) -> int:
    return sum(last - first for first, last in ranges)
