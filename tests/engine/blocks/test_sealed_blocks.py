"""Sealed KV blocks in the engine: a sequence answers the same tokens, whatever happens to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import ConfigError

sealed = pytest.mark.parametrize("kv", ["int4", "k8v4"])
BLOCK = 32


def load(folder: Path, kv: str, **options: Any) -> LLMEngine:
    settings = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    config = EngineConfig(model=str(folder), kv_cache_dtype=kv, **settings)
    return load_llm_engine(config, eos_token_ids=(), metadata=None, on_progress=lambda *_: None)


def request(name: str, length: int, *, seed: int = 0, **sampling: Any) -> Request:
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(3, 512, (length,), generator=generator).tolist())
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 40, **sampling}
    return Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(**settings))


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    for item in requests:
        engine.submit(item)
    answers: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None
            answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    assert engine.stats().blocks_active == 0
    return answers


def alone(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], list[int]]:
    """Run one after another, each prompt in a single chunk, so that nothing disturbs them."""
    return {key: value for item in requests for key, value in run(engine, item).items()}


def undisturbed(folder: Path, kv: str, **options: Any) -> LLMEngine:
    return load(folder, kv, max_num_batched_tokens=512, prefix_caching=False, **options)


@sealed
@pytest.mark.parametrize("rows", [16, 33, 50])
def test_answers_do_not_depend_on_chunks_or_neighbours(
    tiny_llama: Path, kv: str, rows: int
) -> None:
    requests = [request(f"r{i}", 20 + 17 * i, seed=i) for i in range(6)]
    crowd = run(load(tiny_llama, kv, max_num_batched_tokens=rows), *requests)
    assert crowd == alone(undisturbed(tiny_llama, kv), *requests)


@sealed
def test_preempted_sequences_answer_as_if_they_were_not(tiny_llama: Path, kv: str) -> None:
    roomy = undisturbed(tiny_llama, kv)
    block_bytes = roomy.info.kv_bytes // roomy.info.num_blocks
    small = load(tiny_llama, kv, kv_cache_memory=16 * block_bytes, max_model_len=256)
    requests = [request(f"r{i}", 60 + i, seed=i, max_tokens=120) for i in range(6)]
    tight = run(small, *requests)
    assert small.info.num_blocks == 16
    assert small.stats().preemptions_total > 0
    assert tight == alone(roomy, *requests)


@sealed
def test_a_cached_prefix_changes_speed_and_nothing_else(tiny_llama: Path, kv: str) -> None:
    warm = load(tiny_llama, kv)
    for length in (64, 65, 100):
        item = request("a", length, seed=length)
        expected = alone(undisturbed(tiny_llama, kv), item)
        before = warm.stats().prefix_hits_total
        assert run(warm, item) == expected
        assert run(warm, item) == expected
        assert warm.stats().prefix_hits_total - before == (length - 1) // BLOCK * BLOCK


@sealed
@pytest.mark.parametrize("length", [31, 32, 33, 64])
def test_forks_answer_as_if_each_had_its_own_prompt(tiny_llama: Path, kv: str, length: int) -> None:
    """The fork point lies in an open block, at its end, or in a block that is sealed already."""
    forked = run(load(tiny_llama, kv), request("n", length, n=4))
    assert len(set(map(tuple, forked.values()))) > 1
    single = alone(undisturbed(tiny_llama, kv), request("n", length))
    assert forked["n", 0] == single["n", 0]
    apart = load(tiny_llama, kv, max_num_seqs=1, prefix_caching=False)  # one choice at a time
    assert run(apart, request("n", length, n=4)) == forked


@pytest.mark.usefixtures("exact_products")
@sealed
def test_torch_serves_sealed_blocks_too(tiny_llama: Path, kv: str) -> None:
    requests = [
        request(f"r{i}", 30 + 21 * i, seed=i, temperature=0.0, max_tokens=16) for i in range(4)
    ]
    reference = load(tiny_llama, kv, kernels="reference", dtype="float32")
    answers = run(reference, *requests)
    assert answers == alone(reference, *requests)
    assert reference.info.kv_format == {"int4": "int4-sealed"}.get(kv, kv)


@sealed
def test_another_block_size_is_refused(tiny_llama: Path, kv: str) -> None:
    with pytest.raises(ConfigError, match="--block-size 16 cannot be; leave it out"):
        load(tiny_llama, kv, block_size=16)


@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
@pytest.mark.parametrize("kv", ["fp8", "int8", "int4-rotated", "k8v4", "int4-sealed"])
def test_every_precision_is_served_by_every_backend_of_a_cpu(
    tiny_llama: Path, kv: str, kernels: str
) -> None:
    engine = load(tiny_llama, kv, kernels=kernels)
    answers = run(engine, request("a", 30, max_tokens=6), request("b", 70, max_tokens=3))
    assert [len(answer) for answer in answers.values()] == [6, 3]
