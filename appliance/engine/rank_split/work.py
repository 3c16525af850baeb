"""Counts the bytes that a token reads on each rank between two exchanges. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from appliance.engine.rank_split.pipeline import LayerCost
from appliance.model.recurrent_spec import Mamba2Spec, RecurrentSpec
from appliance.model.shard.expert_shares import expected_load
from appliance.model.shard.portion import OF_MLP, kept_portion, layer_portion
from appliance.model.spec import ExpertsSpec
from appliance.model.tensors import Role, TensorSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from appliance.model.shard.shard import LayerShare, Shard
    from appliance.model.spec import DecoderSpec, LayerSpec

# By kind of tensor: a slot that stands for all of a layer's that ranks divide alike.
Amounts = dict[TensorSlot, LayerCost]


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """The bytes of a model's weights by layer, and its keys and values.

    Attributes:
        layers: of each layer.
        vocabulary: of embedding and head.
        beside: held whole by every rank, and read by a token before the first layer.
        kv_reads: bytes of keys and values that a token reads in a layer with a cache.
        kv_holds: bytes of the longest sequence's keys and values in such a layer.
        given: bytes per number in an exchange.
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
        """Count a model's bytes, for a token at half of the context.

        Args:
            slots: all tensors of the model.
            measure: returns the bytes of a tensor as laid out.
            kv_bytes_per_token: of all layers.
        """
        layers: list[Amounts] = [defaultdict(_nothing) for _ in spec.layers]
        vocabulary = beside = _nothing()
        for slot in slots:
            num_bytes = measure(slot)
            one = LayerCost(num_bytes * _read_share(spec, slot), num_bytes)
            if slot.layer is not None:
                kind = _kind_of(slot)
                layers[slot.layer][kind] = _sum(layers[slot.layer][kind], one)
            elif slot.role in (Role.EMBEDDING, Role.HEAD):
                vocabulary = _sum(vocabulary, one)
            else:
                beside = _sum(beside, one)
        each = kv_bytes_per_token * context_length / max(len(spec.cache_layers), 1)
        return cls(spec, tuple(map(dict, layers)), vocabulary, beside, each / 2, each, given)

    def layer_costs(self) -> list[LayerCost]:
        """Return each layer's cost on a rank that has all of it, caches and states included."""
        cached = LayerCost(self.kv_reads, self.kv_holds)
        return [
            _sum(
                *amounts.values(),
                cached if index in self.spec.cache_layers else _nothing(),
                _state(self.spec.layers[index]),
            )
            for index, amounts in enumerate(self.layers)
        ]


@dataclass(frozen=True, slots=True)
class Section:
    """The part of a step between two exchanges.

    Attributes:
        reads: (size,) bytes of each rank.
        gives: bytes that a rank sends at its end; 0 if no rank waits.
    """

    reads: tuple[float, ...]
    gives: float


@dataclass(frozen=True, slots=True)
class TokenWork:
    """The work of one token of one stream, by rank.

    Attributes:
        sections: in their order.
        holds: (size,) bytes of weights and the longest sequence's keys and values.
    """

    sections: tuple[Section, ...]
    holds: tuple[float, ...]


def token_work(model: ModelBytes, shards: Sequence[Shard]) -> TokenWork:
    """Divide a model's bytes among ranks as its shards are."""
    spec, size = model.spec, len(shards)
    row = spec.hidden_size * model.given
    sections = [Section((model.beside.reads,) * size, row)]
    holds = [model.beside.holds] * size
    for index, amounts in enumerate(model.layers):
        layer, shares = spec.layers[index], [shard.layers[index] for shard in shards]
        busiest = _busiest(layer, shares)
        for is_mixer in (True, False):
            reads = []
            for rank, share in enumerate(shares):
                costs = [
                    _part_of(layer, share, kind, cost, busiest)
                    for kind, cost in amounts.items()
                    if _is_mixer(kind) is is_mixer
                ]
                if is_mixer and index in spec.cache_layers:
                    assert layer.mixer is not None
                    kept = 1 if share.heads is None else kept_portion(layer.mixer, share.heads)
                    costs.append(LayerCost(kept * model.kv_reads, kept * model.kv_holds))
                if is_mixer:
                    costs.append(_state(shards[rank].spec.layers[index]))
                cost = _sum(*costs)
                reads.append(cost.reads)
                holds[rank] += cost.holds
            of_mixer, of_mlp = shares[0].heads is not None, shares[0].has_part_of_mlp
            is_divided = of_mixer if is_mixer else of_mlp
            between = _before_norm(shards[0], index, row, is_mixer=is_mixer)
            if is_divided and between:
                sections.append(Section((0.0,) * size, between))
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


def _before_norm(shard: Shard, index: int, row: float, *, is_mixer: bool) -> float:
    """Return the bytes that a norm inside a divided mixer or MLP needs of a rank; 0: none."""
    layer = shard.spec.layers[index]
    if not is_mixer:
        return row if isinstance(layer.mlp, ExpertsSpec) and layer.mlp.own_norms else 0.0
    split = layer.mixer.split if isinstance(layer.mixer, Mamba2Spec) else None
    return 0.0 if split is None else 4.0 * split.count


def _state(layer: LayerSpec) -> LayerCost:
    """Return the bytes of one sequence's state, which a token reads and writes; 0 if none."""
    if not isinstance(layer.mixer, RecurrentSpec):
        return _nothing()
    num_bytes = 4.0 * sum(map(prod, layer.mixer.state))
    return LayerCost(2 * num_bytes, num_bytes)


def _nothing() -> LayerCost:
    return LayerCost(0.0, 0.0)


def _sum(*costs: LayerCost) -> LayerCost:
    return LayerCost(sum(cost.reads for cost in costs), sum(cost.holds for cost in costs))


def _kind_of(slot: TensorSlot) -> TensorSlot:
    return TensorSlot("", slot.shape[:1], slot.role, slot.layer, None if slot.expert is None else 0)


def _is_mixer(kind: TensorSlot) -> bool:
    """Return True for tensors read before the mixer's exchange."""
    return kind.role not in (*OF_MLP, Role.ROUTER, Role.EXPERT_LATENT)


def _busiest(layer: LayerSpec, shares: Sequence[LayerShare]) -> float:
    """Return the busiest rank's reads of experts, relative to its even part."""
    counts = tuple(len(share.experts) for share in shares if share.experts is not None)
    if not counts:
        return 1.0
    assert isinstance(layer.mlp, ExpertsSpec)
    return expected_load(layer.mlp.router.top_k, counts, counts)


def _part_of(
    layer: LayerSpec, share: LayerShare, kind: TensorSlot, cost: LayerCost, busiest: float
) -> LayerCost:
    """Return the bytes that a rank reads and holds of all tensors of a kind."""
    if kind.expert is None or share.experts is None:
        own = layer_portion(layer, share, kind)
        return LayerCost(cost.reads * own, cost.holds * own)
    assert isinstance(layer.mlp, ExpertsSpec)
    own = len(share.experts) / layer.mlp.router.num_experts
    return LayerCost(cost.reads * own * busiest, cost.holds * own)


def _read_share(spec: DecoderSpec, slot: TensorSlot) -> float:
    """Return the share of a tensor that one token reads."""
    if slot.role is Role.EMBEDDING and not spec.tied_head:
        return 1 / slot.shape[0]
    if slot.expert is None or slot.layer is None:
        return 1.0
    mlp = spec.layers[slot.layer].mlp
    assert isinstance(mlp, ExpertsSpec)
    return mlp.router.top_k / mlp.router.num_experts
