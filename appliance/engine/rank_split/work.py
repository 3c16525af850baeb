"""Counts the bytes that a token reads on each rank between two exchanges. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from appliance.engine.rank_split.pipeline import LayerCost
from appliance.model.spec import AttentionSpec, ExpertsSpec, MLPSpec
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from appliance.model.shard.shard import Columns, LayerShare, Shard
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot


class Divided(Enum):
    """The numbers by which ranks divide a tensor."""

    HEADS = "heads"
    KV_HEADS = "KV heads"
    COLUMNS = "columns"
    WHOLE_MIXER = "none of a mixer's"
    WHOLE_MLP = "none of an MLP's"

    @property
    def is_mixer(self) -> bool:
        """True for what is read before the exchange of the mixer."""
        return self in (Divided.HEADS, Divided.KV_HEADS, Divided.WHOLE_MIXER)


_OF_MLP = (Role.GATE, Role.UP, Role.GATE_UP, Role.DOWN)
Amounts = dict[Divided, LayerCost]


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The bytes of a model's weights by layer, and its keys and values.

    Attributes:
        layers: of each layer.
        vocabulary: of embedding and head.
        beside: that every rank holds whole, and a token reads before the first layer.
        kv_reads: bytes of keys and values in a layer that caches some, which a token reads.
        kv_holds: the same of the longest sequence.
        given: bytes of a number in an exchange.
    """

    spec: DecoderSpec
    layers: tuple[Amounts, ...]
    vocabulary: LayerCost
    beside: LayerCost
    kv_reads: float
    kv_holds: float
    given: int

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        slots: Iterable[TensorSlot],
        measure: Callable[[TensorSlot], float],
        kv_bytes_per_token: float,
        context_length: int,
        given: int,
    ) -> ModelBytes:
        """Count a model; a token is at half of its context.

        Args:
            slots: all tensors of the model.
            measure: returns the bytes of a tensor as laid out.
            kv_bytes_per_token: of all layers.
        """
        layers: list[dict[Divided, LayerCost]] = [defaultdict(_nothing) for _ in spec.layers]
        vocabulary = beside = _nothing()
        for slot in slots:
            num_bytes = measure(slot)
            one = LayerCost(num_bytes * _read_share(spec, slot), num_bytes)
            if slot.layer is not None:
                how = _divided_by(slot)
                layers[slot.layer][how] = _sum(layers[slot.layer][how], one)
            elif slot.role in (Role.EMBEDDING, Role.HEAD):
                vocabulary = _sum(vocabulary, one)
            else:
                beside = _sum(beside, one)
        each = kv_bytes_per_token * context_length / max(len(spec.cache_layers), 1)
        return cls(spec, tuple(map(dict, layers)), vocabulary, beside, each / 2, each, given)

    def layer_costs(self) -> list[LayerCost]:
        """Return what each layer costs a rank that has all of it, with its keys and values."""
        return [
            _sum(*amounts.values(), LayerCost(self.kv_reads, self.kv_holds))
            if index in self.spec.cache_layers
            else _sum(*amounts.values())
            for index, amounts in enumerate(self.layers)
        ]


@dataclass(frozen=True, slots=True)
class Section:
    """The part of a step that ranks compute without each other.

    Attributes:
        reads: (size,) bytes of each rank.
        gives: bytes that a rank gives the others at its end; 0: none waits.
    """

    reads: tuple[float, ...]
    gives: float


@dataclass(frozen=True, slots=True)
class TokenWork:
    """One token of one stream on all ranks.

    Attributes:
        sections: in their order.
        holds: (size,) bytes of weights and of the longest sequence's keys and values.
    """

    sections: tuple[Section, ...]
    holds: tuple[float, ...]


def token_work(model: ModelBytes, shards: Sequence[Shard]) -> TokenWork:
    """Divide a model's bytes as its shards are divided."""
    spec, size = model.spec, len(shards)
    row = spec.hidden_size * model.given
    sections = [Section((model.beside.reads,) * size, row)]
    holds = [model.beside.holds] * size
    for index, amounts in enumerate(model.layers):
        shares = [shard.layers[index] for shard in shards]
        caches = index in spec.cache_layers
        for is_mixer in (True, False):
            reads = []
            for rank, share in enumerate(shares):
                costs = [
                    _part(cost, _fraction(spec, index, how, share))
                    for how, cost in amounts.items()
                    if how.is_mixer is is_mixer
                ]
                if is_mixer and caches:
                    kept = LayerCost(model.kv_reads, model.kv_holds)
                    costs.append(_part(kept, _fraction(spec, index, Divided.KV_HEADS, share)))
                cost = _sum(*costs)
                reads.append(cost.reads)
                holds[rank] += cost.holds
            is_divided = (shares[0].heads if is_mixer else shares[0].columns) is not None
            sections.append(Section(tuple(reads), row if is_divided else 0.0))
    tokens = shards[0].tokens
    counts = [tokens[rank + 1] - tokens[rank] for rank in range(size)]
    heads = tuple(model.vocabulary.reads * count / spec.vocab_size for count in counts)
    sections.append(Section(heads, max(counts) * 4.0))  # logits are float32
    holds = [
        held + model.vocabulary.holds * count / spec.vocab_size
        for held, count in zip(holds, counts, strict=True)
    ]
    return TokenWork(tuple(sections), tuple(holds))


def _nothing() -> LayerCost:
    return LayerCost(0.0, 0.0)


def _sum(*costs: LayerCost) -> LayerCost:
    return LayerCost(sum(cost.reads for cost in costs), sum(cost.holds for cost in costs))


def _part(cost: LayerCost, share: float) -> LayerCost:
    return LayerCost(cost.reads * share, cost.holds * share)


def _divided_by(slot: TensorSlot) -> Divided:
    if slot.role in _OF_MLP:
        return Divided.COLUMNS
    if slot.role is Role.ROUTER:
        return Divided.WHOLE_MLP
    if slot.role in (Role.KEY, Role.VALUE):
        return Divided.KV_HEADS
    if slot.role in (Role.QUERY, Role.QKV, Role.OUTPUT):
        return Divided.HEADS
    return Divided.WHOLE_MIXER


def _read_share(spec: DecoderSpec, slot: TensorSlot) -> float:
    """Return the share of a tensor that one token reads."""
    if slot.role is Role.EMBEDDING and not spec.tied_head:
        return 1 / slot.shape[0]
    if slot.expert is None or slot.layer is None:
        return 1.0
    mlp = spec.layers[slot.layer].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp.router.top_k / mlp.router.num_experts


def _fraction(spec: DecoderSpec, index: int, how: Divided, share: LayerShare) -> float:
    """Return a rank's share of what is divided so in a layer; 1 for what all ranks have whole."""
    layer = spec.layers[index]
    if how in (Divided.HEADS, Divided.KV_HEADS) and share.heads is not None:
        assert isinstance(layer.mixer, AttentionSpec)
        if how is Divided.HEADS:
            return share.heads.count / layer.mixer.num_heads
        return share.heads.num_kv / layer.mixer.num_kv_heads
    if how is Divided.COLUMNS and share.columns is not None:
        assert isinstance(layer.mlp, MLPSpec | ExpertsSpec)
        return _width(share.columns) / layer.mlp.intermediate_size
    return 1.0


def _width(columns: Columns) -> int:
    return columns[1] - columns[0]
