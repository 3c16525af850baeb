"""Ranks that torch executes, each in a process that meets the others through gloo."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.json import decode, encode
from support.engine.late_device import LateDevice
from support.engine.replaying import ReplayingSpeculator
from support.kernels.packed_weights import random_packed
from support.kernels.stub_cuda import stub_gpu
from support.models.expert_models import EXPERTS
from support.models.lora import write_adapter
from support.models.recurrent_models import RECURRENT
from support.models.sure_models import THREE_GROUPS, write_sure_model
from support.models.teacher_forcing import BLOCK_SIZE, logits_of, one_sequence
from support.ranks.rank_engines import (
    CACHED_TOKENS,
    PROMPTS,
    answers,
    assert_a_rank_takes_the_engine_along,
    assert_best,
    best_two,
    loaded,
)

from appliance.engine.load.tuning import tune, tune_at_start
from appliance.engine.nouns.request import AdapterRef
from appliance.engine.ranks.messages import TimeKernels
from appliance.engine.ranks.shared_step import RankStep
from appliance.engine.ranks.torch_member import kernels_timed
from appliance.engine.ranks.torch_step import pack, step_tensors
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.kernel_times import PartTimes, use_timed
from appliance.errors import ConfigError
from appliance.files import stamp_of
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices, as_json, from_json
from appliance.kernels.packed_matmul.launch import TiledLinear, prepare_linear
from appliance.kernels.packed_matmul.tiles import MatmulTile
from appliance.kernels.packed_matmul.timed_linear import TimedLinear
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from appliance.engine.engine import LLMEngine
    from appliance.engine.run.device import Graph

# States, and experts of which each rank has columns; latents, with each expert on one rank. Other
# features of families are arithmetic: see model/shard/test_torch_ranks.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "recurrent": (
        RECURRENT["lfm2_moe"][0],
        RECURRENT["lfm2_moe"][1] | {"num_hidden_layers": 3, "moe_intermediate_size": 96},
    ),
    "latent": (
        "deepseek_v2",
        EXPERTS["deepseek_v2"][1]
        | {"num_attention_heads": 6, "num_key_value_heads": 6, "n_shared_experts": 4},
    ),
}
TORCH: dict[str, Any] = {"kernels": "torch", "max_model_len": 160}


def logits(engine: LLMEngine) -> torch.Tensor:
    """Return the logits of a prompt, in a cache of its own on all ranks; ends the engine's."""
    runner: Any = engine.runner
    return logits_of(runner.executor, PROMPTS[0])


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one_process(family: str, tmp_path: Path) -> None:
    """The prompts hit prefixes, and there are more sequences than fit."""
    model_type, settings = FAMILIES[family]
    write_sure_model(model_type, tmp_path, **THREE_GROUPS | settings)
    options = TORCH | {"kv_cache_dtype": "int8", "kv_host_memory": 1 << 22}
    with loaded(tmp_path, **options) as alone:
        expected = answers(alone, PROMPTS)
        of_block = alone.info.kv_bytes // alone.info.num_blocks
        options["kv_cache_memory"] = CACHED_TOKENS // alone.info.block_size * of_block
        if family == "latent":
            options["kv_cache_memory"] *= 2  # each rank has all latents
        state_bytes = alone.info.state_bytes
        of_one = logits(alone)
    with loaded(tmp_path, tensor_parallel=2, gpu_split="2:1", **options) as engine:
        assert [rank.share for rank in engine.info.ranks] == [2, 1]
        assert engine.info.backend == "cpu, 2 ranks 2:1"
        first, second = engine.info.ranks
        assert first.kv_bytes >= second.kv_bytes > 0
        assert first.kv_bytes + second.kv_bytes >= engine.info.kv_bytes
        assert min(first.bytes_per_second, second.bytes_per_second) > 0
        assert first.link is None
        assert second.link is not None
        assert (second.link.path, second.link.reason) == ("sockets of this machine", "")
        assert any("ranks copy " in words for words in engine.info.notes)
        assert state_bytes <= engine.info.state_bytes <= 1.05 * state_bytes, (
            "no state is held twice"
        )
        assert answers(engine, PROMPTS) == expected
        if state_bytes:  # a hit of states, too, ends where prompts diverge
            assert answers(engine, PROMPTS) == expected
        stats = engine.stats()
        assert stats.swapped_in_total > 0
        assert stats.prefix_hits_total > 0
        torch.testing.assert_close(logits(engine), of_one, atol=1e-3, rtol=0)


@pytest.mark.usefixtures("exact_products")
def test_adapters_are_cut_as_the_model_is(tmp_path: Path) -> None:
    """Rank 0 sends each adapter to the others; it is longer than a socket takes at once.

    The model's weights were rounded before they were divided.
    """
    folder = tmp_path / "model"
    write_sure_model("llama", folder, **THREE_GROUPS)
    source = open_model(folder)
    targets = adapter_targets(source.spec, source.family.names).values()
    shapes = {target.name: (target.slot.shape[0], target.slot.shape[1]) for target in targets}
    refs = []
    for name, seed in (("one", 3), ("two", 4)):
        path = write_adapter(tmp_path / name, shapes, rank=64, seed=seed, spread=0.3)
        refs.append(AdapterRef(name, str(path), stamp_of(path)))
    options = TORCH | {
        "lora_dir": str(tmp_path),
        "max_lora_rank": 64,
        "max_loras": 1,  # so that the second adapter replaces the first one in its slot
        "kv_cache_dtype": "fp32",
        "weight_bits": 4,
    }

    def all_answers(engine: LLMEngine) -> list[list[list[int]]]:
        return [answers(engine, PROMPTS[:2], ref) for ref in (None, *refs, refs[0])]

    with loaded(folder, **options) as alone:
        expected = all_answers(alone)
        num_bytes = alone.info.weight_bytes
    assert expected[1] == expected[3]
    assert expected[0] != expected[1] != expected[2]
    with loaded(folder, tensor_parallel=2, gpu_split="2:1", **options) as engine:
        assert all_answers(engine) == expected
        first, second = (rank.weight_bytes for rank in engine.info.ranks)
        assert num_bytes > first > second
        assert first + second < 1.5 * num_bytes


class OneRun(HostDevice):
    """A graph that captures by running once, and replays a function of the test."""

    def __init__(self, replay: Callable[[], None]) -> None:
        self.replay = replay

    def capture(self, function: Callable[[], None]) -> Graph:
        function()
        return self


@pytest.fixture(scope="module")
def late() -> LateDevice:
    return LateDevice()


@pytest.fixture(scope="module")
def two_ranks(
    late: LateDevice, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLMEngine, Path]]:
    """Ranks, the first one's device being late; and the folder of their model."""
    folder = tmp_path_factory.mktemp("llama")
    write_sure_model("llama", folder, **THREE_GROUPS)
    options = TORCH | {"kv_cache_dtype": "int4-sealed", "speculate": "suffix"}
    with loaded(folder, late, ranks=2, **options) as engine:
        yield engine, folder


@pytest.mark.usefixtures("exact_products")
def test_drafts_are_verified_by_all_ranks_and_blocks_are_sealed(
    two_ranks: tuple[LLMEngine, Path], late: LateDevice
) -> None:
    """Some drafts are wrong; steps are planned while only rank 0's device knows the last tokens.

    Ranks add in another order: now and then a key or value is rounded to the next of 16 codes.
    """
    engine, folder = two_ranks
    options = TORCH | {"kv_cache_dtype": "int4-sealed", "speculate": "off"}
    with loaded(folder, **options) as alone:
        expected = best_two(alone, PROMPTS)
    assert "every layer, since torch executes no pipeline" in " ".join(engine.info.notes)
    right = [[best.token_id for best, _ in places] for places in expected]
    engine.scheduler.speculator = ReplayingSpeculator(
        {(str(number), 0): (tokens, [], None) for number, tokens in enumerate(right)},
        0.8,
        engine.grammars.matchers,
        random.Random(5),
    )
    assert_best(answers(engine, PROMPTS), expected, closeness=0.02)
    stats = engine.stats()
    assert stats.draft_tokens_total > stats.accepted_tokens_total > 20
    assert late.captures > 0


@torch.inference_mode()
def test_a_captured_step_is_replayed_by_all_ranks_until_one_ends(
    two_ranks: tuple[LLMEngine, Path],
) -> None:
    """Rank 0 replays as a graph does, without the host's numbers, on other tokens."""
    engine, _ = two_ranks
    runner: Any = engine.runner
    executor: Any = runner.executor
    cache = executor.allocate_cache(KVFormat.FP32, num_blocks=1, block_size=BLOCK_SIZE)
    batch = one_sequence((0,), 0, 4, torch.device("cpu"))
    positions = torch.arange(4)
    others = torch.tensor([9, 8, 7, 6])
    found = []

    def replay() -> None:
        given = step_tensors(RankStep(others, positions, batch, None, wants_logits=True))
        executor.link.joint.broadcast(pack(given, torch.zeros(16, dtype=torch.uint8)))
        found.append(executor.own.forward(others, positions, batch, cache.own))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = executor.forward(tokens, positions, batch, cache)
        return logits

    graph = executor.link.capture(OneRun(replay), lambda: step(torch.tensor([5, 6, 7, 8])))
    expected = step(others)
    graph.replay()
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(step(others), expected)

    assert_a_rank_takes_the_engine_along(engine)


def test_choices_that_were_timed_reach_the_other_ranks(tmp_path: Path) -> None:
    """On the CPU nothing can be timed; orders and answers are the same as on GPUs."""
    write_sure_model("llama", tmp_path, **THREE_GROUPS)
    known = {
        "256 x 64": TimedChoices({16: LaunchChoice(MatmulTile(16, 16, 64, 2, 4), 3)}, 256),
        "attention": TimedChoices({1024: LaunchChoice(keys=256)}),
    }
    with loaded(tmp_path, **TORCH) as alone:
        expected = answers(alone, PROMPTS)
    with loaded(tmp_path, tensor_parallel=2, **TORCH) as engine:
        runner: Any = engine.runner
        link = runner.executor.link
        assert link.time_kernels(1, known, 512, 1.0, KVFormat.INT8) == PartTimes((), known)
        link.use_timed(1, known, KVFormat.INT8)
        assert answers(engine, PROMPTS) == expected
        tune_at_start("auto", runner.executor, 512, KVFormat.INT8, lambda *_: None)
        with pytest.raises(ConfigError, match="on GPUs"):
            tune(runner.executor, 512, 1.0, KVFormat.INT8)


def test_a_rank_works_by_the_choices_that_it_is_told() -> None:
    """Its decoder is on a stub of CUDA's driver; another rank timed for it."""
    with stub_gpu(86):
        linear = prepare_linear(random_packed(256, 1024, 128, symmetric=True), None, torch.bfloat16)
    assert isinstance(linear, TiledLinear)
    work = TimedLinear(linear)
    decoder: Any = SimpleNamespace(
        prompts=None,
        layers=(linear,),
        head=linear,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        backend=REFERENCE,
    )
    x = torch.zeros(16, 1024, dtype=torch.bfloat16)
    with stub_gpu(86) as last:
        known = {work.name: TimedChoices({16: work.candidates(16)[-1]})}
        answer = kernels_timed(decoder, TimeKernels(encode(as_json(known)), 16, 0.0, "int8"))
        assert {entry for entry, name in answer.wanted if name == work.name} == {8, 16}
        assert from_json(decode(answer.choices)) == known
        linear(x)
        assert last.threads == 128  # a tile of four warps was timed
        use_timed(decoder, {}, KVFormat.INT8)
        linear(x)
        assert last.threads == 64
