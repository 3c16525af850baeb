"""One rank's part of a model: its own `DecoderSpec`, and its position in the whole.

Parts that do not divide, such as too few heads, are whole on every rank. Each rank computes them,
and nothing is summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.shard.column_units import COLUMN_UNIT, column_units
from appliance.model.shard.expert_shares import choose_experts
from appliance.model.shard.mixer_ranges import own_mixer
from appliance.model.shard.split import Heads, Split, check_split, cut_heads
from appliance.model.shard.stage import Stage
from appliance.model.spec import DecoderSpec, ExpertsSpec, LayerSpec, MLPSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.model.shard.column_units import ColumnUnits
    from appliance.model.shard.split import Columns
    from appliance.model.source import ModelSource
    from appliance.model.spec import MixerSpec

TOKEN_UNIT = 32


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A rank's part of a layer; None means all of it, on every rank.

    Attributes:
        heads: of the mixer.
        columns: intermediate columns of the MLP, or of every expert.
        experts: whole experts by number, instead of columns of each.
        shared: intermediate columns of the shared MLP.
    """

    heads: Heads | None = None
    columns: Columns | None = None
    experts: range | None = None
    shared: Columns | None = None

    @property
    def has_part_of_mlp(self) -> bool:
        """True if the ranks' results of the MLP or experts have to be summed."""
        return self.columns is not None or self.experts is not None


WHOLE_LAYER = LayerShare()


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model.

    Attributes:
        spec: the part as a model of its own, with the whole vocabulary.
        tokens: (size + 1,) bounds of the ranks' rows of embedding and head.
    """

    rank: int
    size: int
    whole: DecoderSpec
    spec: DecoderSpec
    layers: tuple[LayerShare, ...]
    tokens: tuple[int, ...]

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


# A share of each layer, or a run of layers.
Part: TypeAlias = Shard | Stage


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
            layers=tuple(shares[rank] for shares in layers),
            tokens=tokens,
        )
        for rank in range(split.size)
    )


def shard_source(source: ModelSource, split: Split) -> tuple[Shard, ...]:
    """Divide a model at block bounds; raise ConfigError if shares do not divide its heads."""
    check_split(source.spec, split)
    return shard_model(source.spec, split, column_units(source))


def undivided(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Name the parts that every rank has whole."""
    first = shards[0]
    mixers = sum(
        share.heads is None and layer.mixer is not None
        for share, layer in zip(first.layers, first.spec.layers, strict=True)
    )
    mlps = sum(
        not share.has_part_of_mlp and layer.mlp is not None
        for share, layer in zip(first.layers, first.spec.layers, strict=True)
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
