"""One rank's part of a model: its own `DecoderSpec`, and its position in the whole.

Parts that do not divide, such as too few heads, are whole on every rank. Each rank computes them,
and nothing is summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import factorial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from appliance.kernels.weights.packed import SMALLEST_GROUP
from appliance.kernels.weights.weight import column_unit
from appliance.model.gguf_weights import GGUFWeights
from appliance.model.recurrent_spec import Mamba2Spec, ShortConvSpec
from appliance.model.shard.split import (
    Heads,
    LayerShare,
    Split,
    channel_ranges,
    check_split,
    cut_heads,
    head_counts,
    input_ranges,
    own_mixer,
)
from appliance.model.shard.stage import Stage
from appliance.model.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
)
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.kernels.routing import Router
    from appliance.model.shard.split import Columns
    from appliance.model.source import ModelSource
    from appliance.model.spec import MixerSpec
    from appliance.model.tensors import TensorSlot

OF_MLP = (Role.DOWN, Role.GATE, Role.UP, Role.GATE_UP)
COLUMN_UNIT = 32  # inputs of the smallest group that all kernels support
USUAL_GROUP = 128  # inputs of a block of FP8, and of the largest group
TOKEN_UNIT = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model.

    Attributes:
        spec: the part as a model of its own, with the whole vocabulary.
        shares: of the layers, one each.
        tokens: (size + 1,) bounds of the ranks' rows of embedding and head.
    """

    rank: int
    size: int
    whole: DecoderSpec
    spec: DecoderSpec
    shares: tuple[LayerShare, ...]
    tokens: tuple[int, ...]
    is_first: ClassVar[bool] = True
    is_last: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[int, int]:
        """Its first layer in the model, and one after its last: it has a share of each."""
        return 0, len(self.shares)

    @property
    def cache_layers(self) -> slice:
        """The places of its layers among the model's `cache_layers`, which are all of them."""
        return slice(None)

    @property
    def own_tokens(self) -> slice:
        return slice(self.tokens[self.rank], self.tokens[self.rank + 1])

    @property
    def widest_tokens(self) -> int:
        """Most rows of embedding and head on a rank."""
        return max(last - first for first, last in pairwise(self.tokens))


# A share of each layer, or a run of layers, which have the same attributes.
Part: TypeAlias = Shard | Stage


def shard_source(source: ModelSource, split: Split) -> tuple[Shard, ...]:
    """Divide a model at block bounds; raise ConfigError if shares do not divide its heads."""
    check_split(source.spec, split)
    return shard_model(source.spec, split, column_units(source))


def shard_model(spec: DecoderSpec, split: Split, units: ColumnUnits) -> tuple[Shard, ...]:
    """Divide a model among ranks.

    Args:
        units: columns that should stay together.
    """
    layers = [_shares(layer, split, index, units) for index, layer in enumerate(spec.layers)]
    bounds = split.cut(-(-spec.vocab_size // TOKEN_UNIT))
    assert bounds is not None, "a vocabulary smaller than the ranks"
    tokens = (*(TOKEN_UNIT * bound for bound in bounds[:-1]), spec.vocab_size)
    return tuple(
        Shard(
            rank=rank,
            size=split.size,
            whole=spec,
            spec=replace(
                spec,
                layers=tuple(
                    _own(layer, shares[rank], split.size)
                    for layer, shares in zip(spec.layers, layers, strict=True)
                ),
            ),
            shares=tuple(shares[rank] for shares in layers),
            tokens=tokens,
        )
        for rank in range(split.size)
    )


def undivided(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Name the parts that every rank has whole."""
    first = shards[0]
    mixers = sum(
        share.heads is None and layer.mixer is not None
        for share, layer in zip(first.shares, first.spec.layers, strict=True)
    )
    mlps = sum(
        not share.has_part_of_mlp and layer.mlp is not None
        for share, layer in zip(first.shares, first.spec.layers, strict=True)
    )
    found = (f"the mixers of {mixers} layers" if mixers else "", f"{mlps} MLPs" if mlps else "")
    return tuple(filter(None, found))


def _shares(layer: LayerSpec, split: Split, index: int, units: ColumnUnits) -> list[LayerShare]:
    none: list[None] = [None] * split.size
    columns: Sequence[Columns | None] | None = None
    experts: Sequence[range] | None = None
    shared: Sequence[Columns] | None = None
    mlp = layer.mlp
    if isinstance(mlp, MLPSpec):
        columns = _cut_columns(mlp.intermediate_size, split, index, units)
    elif isinstance(mlp, ExpertsSpec):
        if mlp.shared is not None:
            shared = _cut_columns(mlp.shared.intermediate_size, split, index, units)
        if mlp.shared is None or shared is not None:
            exact = _cut_exactly(mlp.intermediate_size, split, index, units)
            experts = choose_experts(mlp.router, split, exact)
            if experts is None:
                columns = exact or _cut_columns(mlp.intermediate_size, split, index, units)
        if experts is None and columns is None:
            shared = None
    heads = None if layer.mixer is None else _cut_mixer(layer.mixer, split, index, units)
    each = zip(heads or none, columns or none, experts or none, shared or none, strict=True)
    return [LayerShare(*shares) for shares in each]


def _cut_mixer(
    mixer: MixerSpec, split: Split, index: int, units: ColumnUnits
) -> Sequence[Heads] | None:
    """Divide a mixer's heads, or a short convolution's channels; None if they cannot be divided."""
    if not isinstance(mixer, ShortConvSpec):
        return cut_heads(mixer, split)
    channels = _cut_columns(mixer.width, split, index, units)
    if channels is None:
        return None
    return [Heads(first, last - first, first, last - first) for first, last in channels]


def _cut_columns(width: int, split: Split, index: int, units: ColumnUnits) -> list[Columns] | None:
    """Divide columns into whole units, or into `COLUMN_UNIT` if there are too few units."""
    return _cut(width, split, (units.usual(index, width), COLUMN_UNIT))


def _cut_exactly(width: int, split: Split, index: int, units: ColumnUnits) -> list[Columns] | None:
    """Divide columns so that no weight becomes dense; None if that is impossible."""
    least = units.least(index, width)
    wanted = (units.usual(index, width), COLUMN_UNIT)
    return _cut(width, split, [unit for unit in wanted if unit % least == 0])


def _cut(width: int, split: Split, units: Sequence[int]) -> list[Columns] | None:
    """Divide columns into whole units, of the first size that gives enough of them."""
    for unit in units:
        bounds = None if width % unit else split.cut(width // unit)
        if bounds is not None:
            return [(first * unit, last * unit) for first, last in pairwise(bounds)]
    return None


def _own(layer: LayerSpec, share: LayerShare, size: int) -> LayerSpec:
    """Return a rank's part of a layer's spec."""
    mixer, mlp = layer.mixer, layer.mlp
    if share.heads is not None:
        assert mixer is not None
        mixer = own_mixer(mixer, share.heads, size)
    if share.columns is not None:
        assert mlp is not None
        mlp = replace(mlp, intermediate_size=share.columns[1] - share.columns[0])
    if isinstance(mlp, ExpertsSpec):
        mlp = replace(mlp, held=share.experts)
        if mlp.shared is not None and share.shared is not None:
            width = share.shared[1] - share.shared[0]
            mlp = replace(mlp, shared=replace(mlp.shared, intermediate_size=width))
    return replace(layer, mixer=mixer, mlp=mlp)


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


@dataclass(frozen=True, slots=True)
class ColumnUnits:
    """Numbers of adjacent columns, by a layer's index and its number of columns.

    Attributes:
        together: columns that should stay together: a block, or a usual group.
        uncut: columns that must stay together, or a weight becomes dense.
    """

    together: dict[tuple[int, int], int] = field(default_factory=dict)
    uncut: dict[tuple[int, int], int] = field(default_factory=dict)

    def usual(self, layer: int, width: int) -> int:
        return self.together.get((layer, width), COLUMN_UNIT)

    def least(self, layer: int, width: int) -> int:
        return self.uncut.get((layer, width), 1)


def column_units(source: ModelSource) -> ColumnUnits:
    """Find the units of MLPs, experts and short convolutions; reads an expert's weight, if any."""
    units = ColumnUnits()
    is_ordered: bool | None = None
    for slot in source.slots():
        if slot.layer is None or len(slot.shape) != 2:
            continue
        mixer = source.spec.layers[slot.layer].mixer
        is_convolved = slot.role is Role.OUTPUT and isinstance(mixer, ShortConvSpec)
        if slot.role is not Role.DOWN and not is_convolved:
            continue
        at = slot.layer, slot.shape[1]
        units.together[at] = max(units.together.get(at, 0), _usual(source, slot.name))
        if slot.expert is None:
            continue
        if is_ordered is None:
            is_ordered = _is_ordered(source, slot.name)
        least = slot.shape[1] if is_ordered else _least(source, slot.name)
        units.uncut[at] = max(units.uncut.get(at, 0), least)
    return units


def _usual(source: ModelSource, name: str) -> int:
    weights = source.weights
    if isinstance(weights, GGUFWeights):
        return max(weights.block_size(name), COLUMN_UNIT)
    is_packed = weights.packed_bits(name) is not None or weights.float_bits(name) is not None
    return USUAL_GROUP if is_packed else COLUMN_UNIT


def _least(source: ModelSource, name: str) -> int:
    weights = source.weights
    if isinstance(weights, GGUFWeights):
        return weights.block_size(name)
    bits = weights.float_bits(name)
    if bits == 8:
        return USUAL_GROUP
    return 1 if bits is None and weights.packed_bits(name) is None else SMALLEST_GROUP


def _is_ordered(source: ModelSource, name: str) -> bool:
    """Return True if inputs have an order of their own, which is a checkpoint's, not a layer's."""
    is_packed = source.weights.packed_bits(name) is not None
    return is_packed and column_unit(source.weights.load(name)) is None


def choose_experts(
    router: Router, split: Split, columns: Sequence[Columns] | None
) -> list[range] | None:
    """Return the numbers of each rank's experts; None if columns of each expert are better.

    Args:
        columns: of each rank, cut without loss; None if no such cut gives each rank some.
    """
    bounds = split.cut(router.num_experts)
    if bounds is None:
        return None
    experts = [range(first, last) for first, last in pairwise(bounds)]
    if columns is None:
        return experts
    shares = _fractions(split.shares)
    widths = _fractions([last - first for first, last in columns])
    by_columns = max(width / share for width, share in zip(widths, shares, strict=True))
    counts = tuple(map(len, experts))
    return experts if expected_load(router.top_k, counts, split.shares) < by_columns else None


@cache
def expected_load(top_k: int, counts: tuple[int, ...], shares: tuple[int, ...]) -> float:
    """Return the expected load of the busiest rank, in terms of its share; 1 is even.

    A rank's load is its part of the experts that a token chooses, divided by its share. Each expert
    is as likely, and choices do not depend on one another.

    Args:
        counts: of each rank's experts.
        shares: of each rank.
    """
    chances, wanted = _fractions(counts), _fractions(shares)
    loads = sorted({count / (top_k * share) for share in wanted for count in range(top_k + 1)})
    below, expected = 0.0, 0.0
    for load in loads:
        most = [int(load * top_k * share + 1e-9) for share in wanted]
        until = _chance_of_at_most(top_k, chances, most)
        expected += load * (until - below)
        below = until
    return expected


def _chance_of_at_most(top_k: int, chances: Sequence[float], most: Sequence[int]) -> float:
    """Return the probability that no rank has more than `most` of `top_k` choices."""
    ways = [1.0] + [0.0] * top_k  # by the number of choices that the ranks so far have
    for chance, limit in zip(chances, most, strict=True):
        terms = [chance**count / factorial(count) for count in range(min(limit, top_k) + 1)]
        ways = [
            sum(term * ways[total - count] for count, term in enumerate(terms[: total + 1]))
            for total in range(top_k + 1)
        ]
    return factorial(top_k) * ways[top_k]


def _fractions(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts]
