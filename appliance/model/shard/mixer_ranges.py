"""Finds the parts of a mixer that a rank's heads use: input rows, channels, output columns.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, SplitGroup
from appliance.model.spec import AttentionSpec, LatentAttentionSpec

if TYPE_CHECKING:
    from appliance.model.recurrent_spec import RecurrentSpec
    from appliance.model.shard.split import Columns, Heads
    from appliance.model.spec import MixerSpec


def own_mixer(mixer: MixerSpec, heads: Heads, size: int) -> MixerSpec:
    """Return the spec of a rank's heads, as a mixer of its own.

    Args:
        size: number of ranks.
    """
    match mixer:
        case AttentionSpec():
            return replace(mixer, num_heads=heads.count, num_kv_heads=heads.num_kv)
        case LatentAttentionSpec():
            return replace(mixer, num_heads=heads.count)
        case ShortConvSpec():
            return replace(mixer, width=heads.count)
        case GatedDeltaSpec():
            return replace(mixer, num_value_heads=heads.count, num_key_heads=heads.num_kv)
        case Mamba2Spec():
            split = None
            if mixer.num_groups < size:
                split = SplitGroup(
                    heads.first_kv, mixer.num_groups, mixer.values // mixer.num_groups
                )
            return replace(mixer, num_heads=heads.count, num_groups=heads.num_kv, split=split)


def input_ranges(mixer: MixerSpec, heads: Heads) -> list[Columns]:
    """Return a rank's rows of the first linears' concatenated outputs."""
    match mixer:
        case AttentionSpec():
            return _placed(_attention_parts(mixer, heads))
        case LatentAttentionSpec():
            return _placed([_latent_queries(mixer, heads), _whole(mixer.width)])
        case ShortConvSpec():
            return _placed([(mixer.width, _of(heads, 1))] * 3)
        case GatedDeltaSpec():
            gates = (mixer.values, _of(heads, mixer.value_dim))
            rates = (mixer.num_value_heads, _of(heads, 1))
            return _placed([*_channel_parts(mixer, heads), gates, rates, rates])
        case Mamba2Spec():
            gates = (mixer.values, _of(heads, mixer.head_dim))
            return _placed([gates, *_channel_parts(mixer, heads), (mixer.num_heads, _of(heads, 1))])


def channel_ranges(mixer: RecurrentSpec, heads: Heads) -> list[Columns]:
    """Return a rank's channels of the convolution."""
    return _placed(_channel_parts(mixer, heads))


def output_columns(mixer: MixerSpec, heads: Heads) -> Columns:
    """Return a rank's inputs of the last linear."""
    match mixer:
        case AttentionSpec() | Mamba2Spec():
            return _of(heads, mixer.head_dim)
        case ShortConvSpec():
            return _of(heads, 1)
        case LatentAttentionSpec() | GatedDeltaSpec():
            return _of(heads, mixer.value_dim)


def query_range(mixer: LatentAttentionSpec, heads: Heads) -> Columns:
    """Return a rank's rows of the linear whose outputs are query heads."""
    return _of(heads, mixer.query_dim)


_Part = tuple[int, "Columns"]  # a width, and a rank's range of it


def _attention_parts(mixer: AttentionSpec, heads: Heads) -> list[_Part]:
    """Return the parts of queries, keys, values and gates, in this order."""
    width = mixer.head_dim
    queries = (mixer.num_heads * width, _of(heads, width))
    keys = (mixer.num_kv_heads * width, _of_groups(heads, width))
    copies = 0 if mixer.kv_layer is not None else 1 if mixer.keys_are_values else 2
    gates = [(mixer.num_heads, _of(heads, 1))] * mixer.head_gates
    return [queries, *[keys] * copies, *[queries] * mixer.output_gate, *gates]


def _latent_queries(mixer: LatentAttentionSpec, heads: Heads) -> _Part:
    """Return the part of the queries, or all of their latents."""
    if mixer.query_rank is not None:
        return _whole(mixer.query_rank)
    return mixer.num_heads * mixer.query_dim, query_range(mixer, heads)


def _channel_parts(mixer: RecurrentSpec, heads: Heads) -> list[_Part]:
    """Return the parts of a convolution's input, in order."""
    match mixer:
        case ShortConvSpec():
            return [(mixer.width, _of(heads, 1))]
        case GatedDeltaSpec():
            keys = (mixer.keys, _of_groups(heads, mixer.key_dim))
            return [keys, keys, (mixer.values, _of(heads, mixer.value_dim))]
        case Mamba2Spec():
            keys = (mixer.keys, _of_groups(heads, mixer.state_dim))
            return [(mixer.values, _of(heads, mixer.head_dim)), keys, keys]


def _whole(width: int) -> _Part:
    return width, (0, width)


def _of(heads: Heads, width: int) -> Columns:
    return heads.first * width, (heads.first + heads.count) * width


def _of_groups(heads: Heads, width: int) -> Columns:
    return heads.first_kv * width, (heads.first_kv + heads.num_kv) * width


def _placed(parts: list[_Part]) -> list[Columns]:
    """Return the ranges of concatenated parts."""
    found, begin = [], 0
    for width, (first, last) in parts:
        found.append((begin + first, begin + last))
        begin += width
    return found
