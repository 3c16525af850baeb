"""A preempted sequence that returns from host memory answers as if it had stayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.late_device import LateDevice

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams

CPU_FORMATS = ["bf16", "fp32", "fp16", "int8", "fp8", "int4-rotated", "int4", "k8v4"]


def load(folder: Path, kv: str, device: LateDevice | None = None, **options: Any) -> LLMEngine:
    settings = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    config = EngineConfig(model=str(folder), kv_cache_dtype=kv, **settings)
    return load_llm_engine(config, (), None, lambda *_: None, device)


def request(name: str, length: int, *, seed: int = 0, **sampling: Any) -> Request:
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(3, 512, (length,), generator=generator).tolist())
    settings = {"temperature": 1.0, "seed": 5, "max_tokens": 70, "ignore_eos": True, **sampling}
    return Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(**settings))


def crowd() -> list[Request]:
    """Requests that are seeded and greedy in turn."""
    return [request(f"r{i}", 60 + i, seed=i, temperature=float(i % 2)) for i in range(4)]


def run(engine: LLMEngine, *requests: Request) -> dict[str, list[int]]:
    for item in requests:
        engine.submit(item)
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            assert delta.error is None
            answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        engine.check_invariants()
    assert engine.stats().blocks_active == 0
    return answers


def block_bytes(engine: LLMEngine) -> int:
    return engine.info.kv_bytes // engine.info.num_blocks


def tight(folder: Path, kv: str, roomy: LLMEngine, **options: Any) -> LLMEngine:
    """Room for two of the requests: the longest takes 133 tokens."""
    blocks = 256 // roomy.info.block_size
    options = {"max_model_len": 160, **options}
    return load(folder, kv, kv_cache_memory=blocks * block_bytes(roomy), **options)


@pytest.mark.parametrize(
    ("kv", "prefix_caching"),
    [*((kv, True) for kv in CPU_FORMATS), ("bf16", False), ("int4", False)],
)
def test_swapped_sequences_answer_as_if_they_were_not(
    tiny_llama: Path, kv: str, prefix_caching: bool
) -> None:
    roomy = load(tiny_llama, kv)
    small = tight(tiny_llama, kv, roomy, prefix_caching=prefix_caching)
    assert run(small, *crowd()) == run(roomy, *crowd())
    stats = small.stats()
    assert stats.swaps_total == stats.preemptions_total > 0
    assert stats.swapped_in_total > 0
    assert stats.kv_host_blocks == 0


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("kv", ["fp32", "int4"])
def test_torch_swaps_too(tiny_llama: Path, kv: str) -> None:
    options: dict[str, Any] = {"kernels": "torch", "dtype": "float32"}
    roomy = load(tiny_llama, kv, **options)
    small = tight(tiny_llama, kv, roomy, **options)
    assert run(small, *crowd()) == run(roomy, *crowd())
    assert small.stats().swapped_in_total > 0


@pytest.mark.usefixtures("exact_products")
def test_a_runner_that_looks_ahead_swaps_too(tiny_llama: Path) -> None:
    options: dict[str, Any] = {"kernels": "torch", "dtype": "float32"}
    roomy = load(tiny_llama, "int8", **options)
    small = tight(tiny_llama, "int8", roomy, device=LateDevice(), **options)
    assert run(small, *crowd()) == run(roomy, *crowd())
    assert small.stats().swapped_in_total > 0


def test_without_host_memory_victims_are_computed_again(tiny_llama: Path) -> None:
    roomy = load(tiny_llama, "int8")
    small = tight(tiny_llama, "int8", roomy, kv_host_memory=0)
    assert run(small, *crowd()) == run(roomy, *crowd())
    stats = small.stats()
    assert stats.preemptions_total > stats.swaps_total == stats.swapped_out_total == 0


def test_host_memory_for_one_victim_is_never_exceeded(tiny_llama: Path) -> None:
    roomy = load(tiny_llama, "int8")
    size = 12 * block_bytes(roomy)
    small = tight(tiny_llama, "int8", roomy, kv_host_memory=size)
    for item in crowd():
        small.submit(item)
    most = 0
    while small.has_work:
        small.step()
        small.check_invariants()
        most = max(most, small.stats().kv_host_blocks)
    stats = small.stats()
    assert stats.kv_host_capacity == 12
    assert 0 < most <= 12
    assert 0 < stats.swaps_total < stats.preemptions_total


def test_victims_are_computed_again_where_that_is_faster(tiny_llama: Path) -> None:
    roomy = load(tiny_llama, "int8")
    small = tight(tiny_llama, "int8", roomy)
    small.tiers.rates.moves = 1.0  # bytes per second, and a mean that hardly forgets
    for item in crowd():
        small.submit(item)
    while small.has_work:
        small.step()
        small.tiers.rates.moves = 1.0
    stats = small.stats()
    assert stats.preemptions_total > stats.swaps_total == 0


def test_ending_a_swapped_sequence_frees_its_host_memory(tiny_llama: Path) -> None:
    roomy = load(tiny_llama, "int4")
    small = tight(tiny_llama, "int4", roomy)
    for item in crowd():
        small.submit(item)
    host = small.tiers.host
    room = host.room
    while not small.stats().swaps_total:
        assert small.has_work
        small.step()
    assert host.room < room
    for item in crowd():
        small.abort(item.request_id)
    small.step()
    small.check_invariants()
    assert host.room == room
    assert small.stats().kv_host_blocks == 0
    assert not small.has_work


def test_four_times_the_capacity_is_served_by_a_cache_of_two_requests(tiny_llama: Path) -> None:
    """The load that must not livelock: all requests end, in the order of rank."""
    roomy = load(tiny_llama, "int8")
    small = tight(tiny_llama, "int8", roomy, max_num_batched_tokens=32)
    requests = [request(f"r{i}", 64, seed=i, max_tokens=64) for i in range(8)]
    for item in requests:
        small.submit(item)
    ended: list[str] = []
    for _ in range(4000):
        ended += [d.request_id for d in small.step().deltas if d.finish_reason is not None]
        if not small.has_work:
            break
    assert sorted(ended) == sorted(item.request_id for item in requests)
    assert small.stats().preemptions_total > 0
