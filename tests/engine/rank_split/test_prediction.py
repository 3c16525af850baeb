"""Predictions stay within 15 % of a simulated step, whatever the cards, the split and the link."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import pytest
from rank_models import DENSE, MODELS, shards_of
from rank_simulation import RankSimulation

from appliance.engine.links.link import LinkSpeed
from appliance.engine.rank_split import work as rank_split_work
from appliance.engine.rank_split.pipeline import (
    LayerCost,
    RankFacts,
    faster_stages,
    pipeline_cost,
)
from appliance.engine.rank_split.prediction import predict
from appliance.engine.rank_split.work import ModelBytes, TokenWork, token_work
from appliance.kernels.activation import Activation
from appliance.model.names import TensorNames
from appliance.model.recurrent_spec import Mamba2Spec
from appliance.model.shard.split import Split
from appliance.model.spec import DecoderSpec, ExpertsSpec, LayerSpec, MLPSpec, NormSpec
from appliance.model.tensors import tensor_slots

if TYPE_CHECKING:
    from appliance.model.shard.shard import Shard

WEIGHT_BYTES, KV_BYTES, GIVEN = 0.625, 1.0, 2  # 4 bits and scales, 8 bits, bfloat16
CONTEXT = 8192
# Figures of makers: PCI Express 4.0 of 16 and of 4 lanes, and a slow network.
LINKS = [LinkSpeed(8e-6, 25e9), LinkSpeed(20e-6, 6e9), LinkSpeed(80e-6, 1.1e9)]
EXCHANGE_MORE = ("Mamba-2 of one group", "norms beside experts")
CARDS = {
    "1:1": (936e9, 936e9),
    "3:1": (1008e9, 360e9),
    "5:3": (1008e9, 504e9),
    "1:1:1": (936e9, 936e9, 448e9),
}


def counted(spec: DecoderSpec) -> ModelBytes:
    per_token = sum(
        2 * prod((mixer.num_kv_heads, mixer.head_dim)) * KV_BYTES
        for mixer in spec.attention_layers.values()
    )
    return ModelBytes.of(
        *(spec, tensor_slots(spec, TensorNames())),
        lambda slot: WEIGHT_BYTES * prod(slot.shape),
        per_token,
        CONTEXT,
        GIVEN,
    )


@pytest.mark.parametrize(
    ("name", "split", "link"),
    [
        (name, split, LINKS[(place + at) % len(LINKS)])  # each of two beside each other
        for place, name in enumerate(MODELS)
        for at, split in enumerate(CARDS)
    ],
)
def test_a_prediction_is_within_15_percent_of_the_simulation(
    name: str, split: str, link: LinkSpeed
) -> None:
    spec = MODELS[name]
    shares = tuple(map(int, split.split(":")))
    shards = shards_of(spec, Split(shares))
    ranks = [RankFacts(speed) for speed in CARDS[split]]
    work = token_work(counted(spec), shards)
    found = predict(work, ranks, link)
    played = RankSimulation(
        *(shards, ranks, link), weight_bytes=WEIGHT_BYTES, kv_bytes=KV_BYTES, given=GIVEN
    )
    seconds = played.seconds_of_token(CONTEXT // 2 - 4, 8)
    assert found.seconds == pytest.approx(seconds, rel=0.15)
    assert_same_exchanges(work, played)
    size = len(ranks)
    each = 3 if name in EXCHANGE_MORE else 2
    exchanges = 1 + each * len(spec.layers)
    assert played.messages == 8 * (2 * (size - 1) + exchanges * size * (size - 1))


def assert_same_exchanges(work: TokenWork, played: RankSimulation) -> None:
    """Assert that ranks give each other as much as predicted, and as often."""
    gives = [section.gives for section in work.sections if section.gives]
    assert gives[:-1] == played.exchanges, "the last ones are logits, which only rank 0 gets"


@pytest.mark.parametrize("name", EXCHANGE_MORE)
@pytest.mark.parametrize("bug", ["forgets it", "gives a row too many"])
def test_the_simulation_finds_a_prediction_without_the_norms_exchanges(
    name: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, ranks = MODELS[name], [RankFacts(936e9)] * 2
    right = rank_split_work._before_norm

    def before_norm(shard: Shard, index: int, row: float, *, is_mixer: bool) -> float:
        between = right(shard, index, row, is_mixer=is_mixer)
        return between + row if between and bug != "forgets it" else 0.0

    monkeypatch.setattr(rank_split_work, "_before_norm", before_norm)
    shards = shards_of(spec, Split((1, 1)))
    played = RankSimulation(
        *(shards, ranks, LINKS[0]), weight_bytes=WEIGHT_BYTES, kv_bytes=KV_BYTES, given=GIVEN
    )
    played.step(0)
    with pytest.raises(AssertionError, match="the last ones are logits"):
        assert_same_exchanges(token_work(counted(spec), shards), played)


def test_a_recurrent_state_is_read_and_written() -> None:
    """A prediction without it is further from the simulation."""
    spec = MODELS["Mamba-2 of one group"]
    model = counted(spec)
    state_bytes = spec.state_bytes / len(spec.layers)
    bare = sum(cost.reads for cost in model.layers[0].values())
    assert model.layer_costs()[0].reads == pytest.approx(bare + 2 * state_bytes)
    first, second = token_work(model, shards_of(spec, Split((3, 1)))).sections[2].reads
    assert first / second == pytest.approx(3, rel=0.05)


def test_the_slower_card_is_busy_and_the_other_waits() -> None:
    work = token_work(counted(DENSE), shards_of(DENSE, Split((1, 1))))
    found = predict(work, [RankFacts(1000e9), RankFacts(250e9)], LINKS[0])
    assert found.busy[1] == pytest.approx(4 * found.busy[0])
    assert found.busy[1] + found.exchanges / found.seconds == pytest.approx(1)


def test_all_ranks_hold_the_model_and_their_heads_of_the_cache() -> None:
    model = counted(DENSE)
    work = token_work(model, shards_of(DENSE, Split((3, 1))))
    alone = token_work(model, shards_of(DENSE, Split((1,))))
    vectors = [slot.shape for slot in tensor_slots(DENSE, TensorNames()) if len(slot.shape) == 1]
    norms = sum(map(prod, vectors))
    assert sum(work.holds) == pytest.approx(alone.holds[0] + WEIGHT_BYTES * norms)
    assert work.holds[0] / work.holds[1] == pytest.approx(3, rel=0.01)


def test_experts_are_read_as_far_as_a_token_chooses_them() -> None:
    spec = MODELS["experts"]
    model = counted(spec)
    assert model.layer_costs()[0].reads < model.layer_costs()[0].holds / 5


def test_experts_on_one_rank_each_keep_the_busier_rank_waited_for() -> None:
    """No block divides their 720 columns; of 8 experts, one of two ranks has 5.1."""
    layer = MODELS["experts"].layers[0]
    assert isinstance(layer.mlp, ExpertsSpec)
    layer = replace(layer, mlp=replace(layer.mlp, intermediate_size=720))
    spec = replace(MODELS["experts"], layers=(layer,))
    alone, both = (
        token_work(counted(spec), shards_of(spec, Split(shares))) for shares in ((1,), (1, 1))
    )
    (whole,), (first, second) = alone.sections[2].reads, both.sections[2].reads
    assert first == second
    assert first / whole == pytest.approx(1.27 / 2, abs=0.02)
    assert both.holds[0] == pytest.approx(both.holds[1])
    assert both.sections[2].gives > 0


def test_a_norm_of_which_ranks_have_parts_is_an_exchange_more() -> None:
    """A group's sum of squares, before the row that each mixer gives."""
    norm = NormSpec(1e-5)
    layers = (LayerSpec(Mamba2Spec(8, 1, 32, 16, 4, norm), None, norm),)
    spec = DecoderSpec("test", 64, 97, 128, layers, norm, tied_head=True)
    work = token_work(counted(spec), shards_of(spec, Split((1, 1))))
    gives = [section.gives for section in work.sections if section.gives]
    row = float(spec.hidden_size * GIVEN)
    assert gives[:-1] == [row, 4.0, row]


def test_a_pipeline_gives_a_slow_rank_fewer_layers() -> None:
    layers, head = [LayerCost(1e9, 1e9)] * 12, LayerCost(0.0, 0.0)
    ranks = [RankFacts(900e9), RankFacts(300e9)]
    found = faster_stages(layers, head, ranks, LinkSpeed(1e-5, 1e9), 1e4, (0, 6, 12))
    assert found.bounds == (0, 9, 12)
    assert found.stages == pytest.approx((9 / 900, 3 / 300))
    assert found.seconds == pytest.approx(9 / 900 + 3 / 300 + 2e-5 + 1e-5)
    assert found.busy == pytest.approx([0.01 / found.seconds] * 2)


@pytest.mark.parametrize(
    ("speeds", "head", "bounds"),
    [
        ((1.0, 1.0), 0.0, (0, 4, 8)),
        ((1.1, 1.0), 0.0, (0, 4, 8)),  # any other cut is slower
        ((1.2, 1.0), 0.0, (0, 4, 8)),  # five layers take longer than four at even speed
        ((1.3, 1.0), 0.0, (0, 4, 8)),  # gains 4 %
        ((1.5, 1.0), 0.0, (0, 5, 8)),  # gains 17 %
        ((3.0, 1.0), 0.0, (0, 6, 8)),
        ((1.0, 3.0), 0.0, (0, 2, 8)),
        ((1.0, 1.0), 4.0, (0, 6, 8)),  # the head is as much as four layers
        ((1.0, 3.0), 4.0, (0, 3, 8)),
    ],
)
def test_layers_are_divided_by_memory_unless_a_rank_is_clearly_slower(
    speeds: tuple[float, float], head: float, bounds: tuple[int, ...]
) -> None:
    layers, last = [LayerCost(1.0, 1.0)] * 8, LayerCost(head, head)
    ranks = list(map(RankFacts, speeds))
    assert faster_stages(layers, last, ranks, LINKS[0], 1e4, (0, 4, 8)).bounds == bounds


def test_the_head_is_read_by_the_last_rank() -> None:
    layers, head = [LayerCost(1e9, 1e9)] * 12, LayerCost(3e9, 4e9)
    ranks = [RankFacts(900e9), RankFacts(300e9)]
    found = pipeline_cost(layers, head, ranks, LinkSpeed(0.0, 1e9), 0.0, (0, 5, 12))
    assert found.seconds == pytest.approx(5 / 900 + (7 + 3) / 300)


def test_norms_beside_experts_are_an_exchange_more() -> None:
    layer = MODELS["experts"].layers[0]
    assert isinstance(layer.mlp, ExpertsSpec)
    mlp = replace(layer.mlp, own_norms=True, shared=MLPSpec(768, Activation.SILU))
    spec = replace(MODELS["experts"], layers=(replace(layer, mlp=mlp),))
    work = token_work(counted(spec), shards_of(spec, Split((1, 1))))
    row = float(spec.hidden_size * GIVEN)
    gives = [section.gives for section in work.sections if section.gives]
    assert gives[:-1] == [row] * 4  # of the embedding, the mixer, the MLP and the experts
