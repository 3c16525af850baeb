"""One rank's part of a model: its own `DecoderSpec`, and its position in the whole.

Parts that do not divide are whole on every rank: recurrent and latent mixers, too few heads,
experts with their own norms. Each rank computes them, and nothing is summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from appliance.model.gguf_weights import GGUFWeights
from appliance.model.shard.split import Heads, Split, check_split, cut_heads
from appliance.model.shard.stage import Stage
from appliance.model.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MLPSpec
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.model.source import ModelSource

COLUMN_UNIT = 32  # inputs of the smallest group that all kernels support
USUAL_GROUP = 128  # inputs of a block of FP8, and of the largest group
TOKEN_UNIT = 32

Columns = tuple[int, int]  # first and one after the last


@dataclass(frozen=True, slots=True)
class LayerShare:
    """A rank's part of a layer; None means all of it, on every rank."""

    heads: Heads | None
    columns: Columns | None  # intermediate columns of the MLP, or of every expert
    shared: Columns | None  # intermediate columns of the shared MLP


WHOLE_LAYER = LayerShare(None, None, None)


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model.

    Attributes:
        spec: of the part as a model of its own, with the whole vocabulary.
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
        """The places of its layers among the model's `cache_layers`: all of them."""
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


def shard_model(
    spec: DecoderSpec, split: Split, unit_of: Callable[[int, int], int]
) -> tuple[Shard, ...]:
    """Divide a model among ranks.

    Args:
        unit_of: returns the number of adjacent MLP columns to keep together, from a layer's index
            and its number of columns.
    """
    layers = [_shares(layer, split, index, unit_of) for index, layer in enumerate(spec.layers)]
    units = split.cut(-(-spec.vocab_size // TOKEN_UNIT))
    assert units is not None, "a vocabulary smaller than the ranks"
    tokens = (*(TOKEN_UNIT * bound for bound in units[:-1]), spec.vocab_size)
    return tuple(
        Shard(
            rank=rank,
            size=split.size,
            whole=spec,
            spec=replace(
                spec,
                layers=tuple(
                    _own(layer, shares[rank])
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


def column_units(source: ModelSource) -> Callable[[int, int], int]:
    """Return a function for `shard_model` that says which columns had better stay together."""
    units: dict[tuple[int, int], int] = {}
    for slot in source.slots():
        if slot.role is Role.DOWN and slot.layer is not None and len(slot.shape) == 2:
            at = slot.layer, slot.shape[1]
            units[at] = max(units.get(at, 0), _unit(source, slot.name))
    return lambda *at: units.get(at, COLUMN_UNIT)


def _unit(source: ModelSource, name: str) -> int:
    """Return the number of columns to keep together: a block or a usual group."""
    weights = source.weights
    if isinstance(weights, GGUFWeights):
        return max(weights.block_size(name), COLUMN_UNIT)
    is_packed = weights.packed_bits(name) is not None or weights.float_bits(name) is not None
    return USUAL_GROUP if is_packed else COLUMN_UNIT


def undivided(shards: Sequence[Shard]) -> tuple[str, ...]:
    """Name the parts that every rank has whole."""
    first = shards[0]
    mixers = sum(
        share.heads is None and layer.mixer is not None
        for share, layer in zip(first.layers, first.spec.layers, strict=True)
    )
    mlps = sum(
        share.columns is None and layer.mlp is not None
        for share, layer in zip(first.layers, first.spec.layers, strict=True)
    )
    found = (f"the mixers of {mixers} layers" if mixers else "", f"{mlps} MLPs" if mlps else "")
    return tuple(filter(None, found))


def _shares(
    layer: LayerSpec, split: Split, index: int, unit_of: Callable[[int, int], int]
) -> list[LayerShare]:
    heads: Sequence[Heads | None] | None = None
    if isinstance(layer.mixer, AttentionSpec):
        heads = cut_heads(layer.mixer, split)
    columns = shared = None
    mlp = layer.mlp
    if isinstance(mlp, MLPSpec):
        columns = _cut_columns(mlp.intermediate_size, split, index, unit_of)
    elif isinstance(mlp, ExpertsSpec) and not mlp.own_norms:
        columns = _cut_columns(mlp.intermediate_size, split, index, unit_of)
        if columns is not None and mlp.shared is not None:
            shared = _cut_columns(mlp.shared.intermediate_size, split, index, unit_of)
            columns = None if shared is None else columns
    none: list[None] = [None] * split.size
    each = zip(heads or none, columns or none, shared or none, strict=True)
    return [LayerShare(*shares) for shares in each]


def _cut_columns(
    width: int, split: Split, index: int, unit_of: Callable[[int, int], int]
) -> list[Columns] | None:
    """Divide columns into whole units, or into `COLUMN_UNIT` if there are too few units."""
    for unit in (unit_of(index, width), COLUMN_UNIT):
        bounds = None if width % unit else split.cut(width // unit)
        if bounds is not None:
            return [(first * unit, last * unit) for first, last in pairwise(bounds)]
    return None


def _own(layer: LayerSpec, share: LayerShare) -> LayerSpec:
    """Return a rank's part of a layer's spec."""
    mixer, mlp = layer.mixer, layer.mlp
    if share.heads is not None:
        assert isinstance(mixer, AttentionSpec)
        mixer = replace(mixer, num_heads=share.heads.count, num_kv_heads=share.heads.num_kv)
    if share.columns is not None:
        assert mlp is not None
        mlp = replace(mlp, intermediate_size=share.columns[1] - share.columns[0])
        if isinstance(mlp, ExpertsSpec) and mlp.shared is not None:
            assert share.shared is not None
            width = share.shared[1] - share.shared[0]
            mlp = replace(mlp, shared=replace(mlp.shared, intermediate_size=width))
    return replace(layer, mixer=mixer, mlp=mlp)
