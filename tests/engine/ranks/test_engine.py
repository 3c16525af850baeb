"""An engine whose model is divided among processes answers as an engine with the whole model."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from support.engine.drafting import draft_always
from support.engine.replaying import ReplayingSpeculator
from support.models.expert_models import EXPERTS
from support.models.lora import write_adapter
from support.models.recurrent_models import RECURRENT
from support.models.sure_models import THREE_GROUPS, write_sure_model
from support.ranks.rank_engines import (
    CACHED_TOKENS,
    PROMPTS,
    answers,
    assert_a_rank_takes_the_engine_along,
    loaded,
)
from support.runs.waiting import wait_until

from appliance.config import EngineConfig
from appliance.engine.devices import Precision
from appliance.engine.load.execution.choice import execution_for
from appliance.engine.nouns.request import AdapterRef
from appliance.engine.ranks import rank_group, started
from appliance.engine.ranks.link import LinkPath, LinkSpeed, LinkTrial
from appliance.errors import ConfigError, EngineError
from appliance.files import stamp_of
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.adapters.targets import adapter_targets
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path

# Settings with which heads divide by 2:1, and shared MLPs into units of 32 columns.
IN_THREE: dict[str, dict[str, Any]] = {
    "qwen3_5": {"linear_num_key_heads": 3},
    "nemotron_h": {
        "mamba_num_heads": 6,
        "n_groups": 3,
        "moe_shared_expert_intermediate_size": 96,
    },
    "deepseek_v3": {"num_key_value_heads": 6, "n_shared_experts": 4},
}
WAYS: list[dict[str, Any]] = [
    {"tensor_parallel": 2, "gpu_split": "2:1"},
    {"pipeline_parallel": 2, "gpu_split": "2:1"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("ranks") / "model"
    return write_sure_model("llama", folder, **THREE_GROUPS), folder


@pytest.mark.parametrize(
    ("kv", "divided", "note"),
    [
        ("int4-sealed", WAYS[0], "divide the model 2:1, heads 4:2"),
        ("int8", WAYS[1], "run the model's layers in turn"),
    ],
)
def test_blocks_are_shared_swapped_and_drafts_verified(
    model: tuple[Any, Path], kv: str, divided: dict[str, Any], note: str
) -> None:
    folder = model[1]
    settings: dict[str, Any] = {
        "kv_cache_dtype": kv,
        "kv_host_memory": 1 << 22,
        "max_model_len": 160,
        "speculate": "suffix",
    }
    with loaded(folder, **settings) as alone:
        expected = answers(alone, PROMPTS)
        assert not alone.info.ranks
        blocks = CACHED_TOKENS // alone.info.block_size
        settings["kv_cache_memory"] = blocks * alone.info.kv_bytes // alone.info.num_blocks
    with loaded(folder, **divided, **settings) as engine:
        assert [rank.share for rank in engine.info.ranks] == [2, 1]
        assert engine.info.num_blocks == blocks, "nothing is cached in two ranks"
        assert any(note in words for words in engine.info.notes), engine.info.notes
        first, second = engine.info.ranks
        assert first.kv_bytes + second.kv_bytes >= engine.info.kv_bytes
        assert min(first.bytes_per_second, second.bytes_per_second) > 0
        assert first.link is None
        assert second.link is not None
        assert second.link.path == "shared memory"
        if "tensor_parallel" in divided:
            assert first.kv_bytes == 2 * second.kv_bytes
            assert any("ranks copy " in words for words in engine.info.notes)
        assert [answers(engine, PROMPTS), answers(engine, PROMPTS)] == [expected, expected]
        stats = engine.stats()
        assert stats.swaps_total > 0
        assert stats.prefix_hits_total > 0


def test_stages_hold_states_and_experts_whole(tmp_path: Path) -> None:
    """Sequences are preempted and resumed, with states in two of three stages."""
    expected, settings, _ = answers_of_one("lfm2_moe", tmp_path)
    with loaded(tmp_path, pipeline_parallel=3, threads=3, **settings) as engine:
        assert [rank.layers for rank in engine.info.ranks] == [(0, 1), (1, 2), (2, 3)]
        assert [answers(engine, PROMPTS), answers(engine, PROMPTS)] == [expected, expected]
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_hits_total > 0


@pytest.mark.parametrize("model_type", ["qwen3_5", "nemotron_h", "deepseek_v3"])
def test_ranks_divide_states_latents_and_experts(model_type: str, tmp_path: Path) -> None:
    """Sequences are preempted and resumed, and drafts are undone, in the states of all ranks."""
    expected, settings, state_bytes = answers_of_one(model_type, tmp_path, speculate="suffix")
    if model_type == "deepseek_v3":
        settings["kv_cache_memory"] *= 2  # each rank has all latents
    with loaded(tmp_path, tensor_parallel=2, gpu_split="2:1", **settings) as engine:
        engine.scheduler.speculator = ReplayingSpeculator(
            {(str(number), 0): (tokens, [], None) for number, tokens in enumerate(expected)},
            0.8,
            engine.grammars.matchers,
            random.Random(5),
        )
        assert not any("each has all of" in words for words in engine.info.notes)
        assert state_bytes <= engine.info.state_bytes <= 1.05 * state_bytes, (
            "no state is held twice"
        )
        assert [answers(engine, PROMPTS), answers(engine, PROMPTS)] == [expected, expected]
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_hits_total > 0
        assert (stats.state_restores_total > 0) is (state_bytes > 0)
        assert stats.draft_tokens_total > stats.accepted_tokens_total > 0


def answers_of_one(
    model_type: str, folder: Path, **options: Any
) -> tuple[list[list[int]], dict[str, Any], int]:
    """Write a model; return one process's answers, settings of a small cache, and states' bytes."""
    table = RECURRENT if model_type in RECURRENT else EXPERTS
    name, own = table[model_type]
    sizes = THREE_GROUPS | {"num_hidden_layers": 3} | IN_THREE.get(model_type, {})
    write_sure_model(name, folder, **own | sizes)
    settings: dict[str, Any] = {"max_model_len": 160, "kv_cache_dtype": "int8", **options}
    with loaded(folder, **settings) as alone:
        blocks = CACHED_TOKENS // alone.info.block_size
        settings["kv_cache_memory"] = blocks * alone.info.kv_bytes // alone.info.num_blocks
        return answers(alone, PROMPTS), settings, alone.info.state_bytes


@pytest.mark.parametrize("divided", WAYS)
def test_a_draft_model_runs_beside_the_ranks_until_one_ends(
    model: tuple[Any, Path], divided: dict[str, Any]
) -> None:
    """Rank 0 has the whole draft model, and runs it between two steps of the 8-bit model."""
    settings: dict[str, Any] = {"weight_bits": 8, "kv_cache_dtype": "fp32", "max_model_len": 160}
    with loaded(model[1], speculate="off", **settings) as alone:
        expected = answers(alone, PROMPTS)
        num_bytes = alone.info.weight_bytes
    with loaded(model[1], **divided, speculate="draft=self", **settings) as engine:
        draft_always(engine)
        speculator: Any = engine.scheduler.speculator
        speculator.proposers = ()  # the draft model alone
        assert answers(engine, PROMPTS) == expected
        assert engine.stats().accepted_tokens_total > 20
        assert engine.info.drafts.startswith("the model itself at 4 bits: 2 layers, ")
        assert sum(rank.weight_bytes for rank in engine.info.ranks) < 1.5 * num_bytes

        assert_a_rank_takes_the_engine_along(engine)


@pytest.mark.parametrize("divided", WAYS)
def test_adapters_are_cut_as_the_model_is(
    model: tuple[Any, Path], tmp_path: Path, divided: dict[str, Any]
) -> None:
    folder = model[1]
    source = open_model(folder)
    targets = adapter_targets(source.spec, source.family.names).values()
    shapes = {target.name: (target.slot.shape[0], target.slot.shape[1]) for target in targets}
    # Longer than a socket takes at once.
    path = write_adapter(tmp_path / "adapter", shapes, rank=64, spread=0.3)
    ref = AdapterRef("tuned", str(path), stamp_of(path))
    settings: dict[str, Any] = {
        "lora_dir": str(tmp_path),
        "max_lora_rank": 64,
        "kv_cache_dtype": "fp32",
    }
    with loaded(folder, **settings) as alone:
        expected = [answers(alone, PROMPTS), answers(alone, PROMPTS, ref)]
    assert expected[0] != expected[1]
    with loaded(folder, **divided, **settings) as engine:
        assert [answers(engine, PROMPTS), answers(engine, PROMPTS, ref)] == expected


@pytest.mark.parametrize("speeds", [(1e4, 4e4), (1.05e4, 1e4)])
def test_auto_divides_by_measured_bandwidth(
    model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, float]
) -> None:
    """Weights are rounded to groups of 4 bits before they are divided."""
    monkeypatch.setattr(started, "copy_rates", lambda ranks, threads: speeds)
    options: dict[str, Any] = {"weight_bits": 4, "kv_cache_dtype": "fp32", "max_model_len": 160}
    with loaded(model[1], **options) as alone:
        expected, num_bytes = answers(alone, PROMPTS), alone.info.weight_bytes
    with loaded(model[1], tensor_parallel=2, **options) as engine:
        first, second = (rank.share for rank in engine.info.ranks)
        if abs(speeds[0] - speeds[1]) < 0.1 * speeds[0]:
            assert first == second == 1
        else:
            assert (first > second) is (speeds[0] > speeds[1])
        assert engine.info.backend.endswith(f", 2 ranks {first}:{second}")
        assert sum(rank.weight_bytes for rank in engine.info.ranks) < 1.5 * num_bytes
        assert answers(engine, PROMPTS) == expected


@pytest.mark.parametrize(
    ("speeds", "gpu_split", "layers"),
    [
        ((1e4, 3e4), "auto", [1, 2]),
        ((1e4, 3e4), "2:1", [2, 1]),
    ],
)
def test_a_pipeline_gives_the_faster_rank_more_layers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    speeds: tuple[float, float],
    gpu_split: str,
    layers: list[int],
) -> None:
    """Requested shares override this."""
    monkeypatch.setattr(started, "copy_rates", lambda ranks, threads: speeds)
    write_sure_model("llama", tmp_path, **THREE_GROUPS | {"num_hidden_layers": 3})
    options: dict[str, Any] = {"pipeline_parallel": 2, "gpu_split": gpu_split}
    with loaded(tmp_path, max_model_len=160, **options) as engine:
        runs = [rank.layers for rank in engine.info.ranks]
        assert [run[1] - run[0] for run in runs if run is not None] == layers


USUAL, SLOW = LinkSpeed(1e-3, 1e8), LinkSpeed(5e-3, 1e7)


@pytest.mark.parametrize(
    ("setting", "speed", "said"),
    [
        ("ranks", USUAL, ""),
        ("ranks", SLOW, "since --ranks 2 needs a faster link than shared memory"),
        ("tensor_parallel", SLOW, "since --tensor-parallel 2 needs a faster link than"),
    ],
)
def test_a_link_decides_between_shares_and_whole_layers(
    model: tuple[Any, Path],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    speed: LinkSpeed,
    said: str,
) -> None:
    trial = LinkTrial(LinkPath.SHARED, speed)
    monkeypatch.setattr(started, "try_links", lambda ranks: (trial,))
    options: dict[str, Any] = {setting: 2, "kv_cache_dtype": "fp32", "max_model_len": 160}
    with loaded(model[1], **options) as engine:
        first, second = engine.info.ranks
        assert any(re.search(said, words) for words in engine.info.notes), engine.info.notes
        if said:
            assert (first.layers, second.layers) == ((0, 1), (1, 2))
            assert re.search(said.partition("since ")[2], first.reason)
            assert ", whole layers, since " in str(first)
        else:
            assert first.layers is None
            assert first.reason == ""
        assert second.reason == "", "it is told once"
        assert answers(engine, PROMPTS[:1]) == expected_of(model[1])


@cache
def expected_of(folder: Path) -> list[list[int]]:
    with loaded(folder, kv_cache_dtype="fp32", max_model_len=160) as alone:
        return answers(alone, PROMPTS[:1])


def test_a_link_that_may_not_be_used_ends_the_start(
    model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = "changes data: 1 of 16 numbers"
    bad = LinkTrial(LinkPath.SHARED, None, problem)
    monkeypatch.setattr(started, "try_links", lambda ranks: (bad,))
    before = psutil.Process().children()
    with (
        pytest.raises(EngineError, match=f"rank 1 may not be used: shared memory {problem}.*torch"),
        loaded(model[1], tensor_parallel=2),
    ):
        pass
    assert psutil.Process().children() == before


def test_ranks_end_with_the_engine(model: tuple[Any, Path]) -> None:
    with loaded(model[1], tensor_parallel=2) as engine:
        pid = engine.info.ranks[1].pid
        assert psutil.pid_exists(pid)
        del engine
    wait_until(lambda: not psutil.pid_exists(pid), "the rank's end")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tensor_parallel": 2, "gpu_split": "1:1"}, "6 heads in 3 groups.*2:1"),
        ({"tensor_parallel": 2, "gpu_split": "2"}, "has 1 shares for 2 processes"),
        ({"gpu_split": "2:1"}, "say how many with --ranks"),
        ({"pipeline_parallel": 3}, "this model has 2; use --pipeline-parallel 2 or less"),
        (
            {"pipeline_parallel": 2, "tensor_parallel": 2},
            "exclude one another.*use --tensor-parallel 4 or --pipeline-parallel 4",
        ),
        ({"ranks": 2, "tensor_parallel": 2}, "--ranks 2 and --tensor-parallel 2 ex.*or --ranks 2,"),
        ({"pipeline_parallel": 2, "gpu_split": "2"}, "has 1 shares for 2 processes"),
        (
            {"pipeline_parallel": 2, "kernels": "torch"},
            "--pipeline-parallel 2 needs the CPU library: --kernels torch does without",
        ),
        ({"pipeline_parallel": 2, "block_size": 8}, "needs the CPU library: its blocks"),
        (
            {"tensor_parallel": 2, "kernels": "torch", "speculate": "suffix"},
            "needs a GPU or the CPU library, whose answers drafts do not change",
        ),
    ],
)
def test_bad_settings_are_refused_before_a_rank_is_started(
    model: tuple[Any, Path], options: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "COMMAND", ("false",))
    with pytest.raises(ConfigError, match=match), loaded(model[1], **options):
        pass


def test_more_ranks_than_gpus_are_refused(
    model: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    layers = (LayerPrecision(KVFormat.BF16),) * 2
    gpu = Precision(torch.device("cuda"), torch.bfloat16, KVFormat.BF16, 32, layers)
    config = EngineConfig(model=str(model[1]), tensor_parallel=2)
    with pytest.raises(ConfigError, match="needs as many GPUs, and PyTorch sees 1"):
        execution_for(config, gpu, open_model(model[1]), 1)
