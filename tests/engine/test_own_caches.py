"""Sequences with caches of transformers' own classes through the whole engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.greedy_answers import by_transformers, run
from support.models.own_cache_models import sizes_of
from support.models.sure_models import write_sure_model

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.load.memory_request import request_memory
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.served_model import open_served
from appliance.errors import ConfigError, MemoryPlanError
from appliance.model.fallback.own_cache import tensors_in

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = 36
PROMPTS = [
    torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (33, 61, 75, 20, 52)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A transformers model whose cache grows, and the folder that it was written to."""
    return written("bloom", tmp_path_factory)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same for a model with a state of constant size beside a growing cache."""
    return written("zaya", tmp_path_factory)


def written(name: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(name)
    made = write_sure_model(name, folder, **sizes_of(name))
    made.generation_config.pad_token_id = 0
    return made, folder


def load(folder: Path, **options: Any) -> LLMEngine:
    usual: dict[str, Any] = {
        "model": str(folder),
        "threads": 1,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "dtype": "float32",
        "max_model_len": 128,
    }
    return load_llm_engine(
        EngineConfig(**usual | options),
        eos_token_ids=(),
        metadata=None,
        on_progress=lambda stage, done, total: None,
    )


def held_bytes(engine: LLMEngine) -> int:
    """Count what all caches of an engine hold."""
    cache: Any = engine.runner.cache  # type: ignore[attr-defined]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for held in cache.held.values()
        for _, _, tensor in tensors_in([held.cache, list(held.inside)])
    }
    return sum(storages.values())


def watched(engine: LLMEngine) -> list[int]:
    """Record after each step what its caches hold, and compare that with the block counts."""
    noted: list[int] = []
    step, blocks = engine.step, engine.scheduler.state.blocks

    def stepped() -> Any:
        report = step()
        engine.check_invariants()
        noted.append(held_bytes(engine))
        assert noted[-1] <= engine.info.kv_bytes + engine.info.state_bytes
        return report

    assert blocks.num_blocks == engine.info.num_blocks
    engine.step = stepped  # type: ignore[method-assign]
    return noted


@pytest.mark.parametrize("name", ["model", "layered"])
def test_answers_equal_transformers_side_by_side_after_each_other_and_preempted(
    name: str, request: pytest.FixtureRequest
) -> None:
    made, folder = request.getfixturevalue(name)
    wanted = [by_transformers(made, prompt, TOKENS) for prompt in PROMPTS]
    assert len({token for answer in wanted for token in answer}) > 3
    roomy = load(folder)
    noted = watched(roomy)
    assert run(roomy, PROMPTS, TOKENS) == wanted  # five sequences take turns in three slots
    assert run(roomy, PROMPTS[3:], TOKENS) == wanted[3:]
    assert max(noted) > 0
    small = load(folder, kv_cache_memory=14 * (roomy.info.kv_bytes // roomy.info.num_blocks))
    watched(small)
    assert run(small, PROMPTS, TOKENS) == wanted
    assert small.stats().preemptions_total > 0


def test_a_text_that_fills_the_context_is_that_of_transformers(model: Any) -> None:
    made, folder = model
    prompt = (PROMPTS[1] + PROMPTS[2])[:100]
    engine = load(folder)
    noted = watched(engine)
    (found,) = run(engine, [prompt], 100)
    assert found == by_transformers(made, prompt, 28)
    (other,) = run(engine, [PROMPTS[3]], 1)
    assert other == by_transformers(made, PROMPTS[3], 1)
    assert noted[-1] < max(noted), "what has ended is dropped with the next step"


def test_siblings_and_beams_go_on_with_copies(layered: Any) -> None:
    made, folder = layered
    prompt = PROMPTS[0]
    engine = load(folder)
    watched(engine)
    two = SamplingParams(n=2, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    assert answers(engine, prompt, two) == [by_transformers(made, prompt, TOKENS)] * 2
    beams = made.generate(
        torch.tensor([prompt]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
    )
    sampling = SamplingParams(
        n=3, use_beam_search=True, temperature=0.0, max_tokens=TOKENS, ignore_eos=True
    )
    assert answers(engine, prompt, sampling) == beams[:, len(prompt) :].tolist()


def answers(engine: LLMEngine, prompt: list[int], sampling: SamplingParams) -> list[list[int]]:
    engine.submit(Request(request_id="n", prompt_token_ids=tuple(prompt), sampling=sampling))
    found: list[list[int]] = [[] for _ in range(sampling.n)]
    while engine.has_work:
        for delta in engine.step().deltas:
            found[delta.index].extend(delta.token_ids)
    return found


def test_one_that_is_cancelled_leaves_its_slot_to_the_next(model: Any) -> None:
    made, folder = model
    engine = load(folder, max_num_seqs=1)
    watched(engine)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    engine.submit(Request(request_id="a", prompt_token_ids=tuple(PROMPTS[2]), sampling=sampling))
    engine.step()
    engine.abort("a")
    assert run(engine, PROMPTS[3:4], TOKENS) == [by_transformers(made, PROMPTS[3], TOKENS)]


def test_it_says_how_it_is_executed_and_fit_counts_the_same(model: Any) -> None:
    made, folder = model
    info = load(folder).info
    name = type(made).__name__
    (note,) = [note for note in info.notes if note.startswith("transformers' modules execute")]
    assert f"execute {name}, each sequence with a cache of its own class" in note
    config = EngineConfig(model=str(folder), threads=1, max_num_seqs=3)
    _, request = request_memory(config, open_served(config))
    assert 3 * request.state_bytes == info.state_bytes
    assert not request.prefix_caching
    halves = load(folder, dtype="bfloat16", kernels="torch")
    watched(halves)
    run(halves, PROMPTS[:3], TOKENS)
    assert 2 * halves.info.kv_bytes == info.kv_bytes
    packed = load(folder, dtype="auto", weight_bits=8)
    assert packed.info.weight_format.startswith("8 bits")
    assert packed.info.weight_bytes < info.weight_bytes


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel": 2}, "--tensor-parallel 2 divides models of a family here"),
        ({"lora_dir": "adapters"}, "leave out --lora and --lora-dir"),
        ({"speculate": "suffix"}, "--speculate suffix cannot be had"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 cannot be had"),
        ({"kv_host_memory": 1 << 20}, "--kv-host-memory cannot be had"),
    ],
)
def test_what_such_caches_cannot_have_is_refused_by_name(
    model: Any, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load(model[1], **options)


def test_what_does_not_fit_is_refused_before_memory_is_taken(model: Any) -> None:
    with pytest.raises(MemoryPlanError, match="this does not fit"):
        load(model[1], kv_cache_memory=16 << 10)
