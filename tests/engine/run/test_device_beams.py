"""Whole beam searches: the asynchronous runner finds what the synchronous one finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine.late_device import LateDevice

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.scheduling import turns

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.engine.run.device import Device

pytestmark = pytest.mark.usefixtures("exact_products")  # so that torch's results are reproducible

EOS = tuple(range(5, 512, 17))  # many, so that some answers end early


def load(folder: Path, device: Device | None, **options: Any) -> LLMEngine:
    defaults = {
        "threads": 1,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "kernels": "torch",
        "dtype": "float32",
        "kv_cache_dtype": "fp32",
    }
    config = EngineConfig(**{"model": str(folder), **defaults, **options})
    return load_llm_engine(config, EOS, None, lambda stage, done, total: None, device)


def request(name: str, length: int, **sampling: Any) -> Request:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, 512, (length,), generator=generator).tolist()
    return Request(
        request_id=name, prompt_token_ids=tuple(tokens), sampling=SamplingParams(**sampling)
    )


SEARCHES = [
    request("wide", 40, n=6, use_beam_search=True, max_tokens=20),
    request("few", 9, n=1, best_of=3, use_beam_search=True, max_tokens=12, logprobs=2),
    request("never", 70, n=3, use_beam_search=True, max_tokens=16, early_stopping="never"),
    request("banned", 21, n=2, use_beam_search=True, max_tokens=9, min_tokens=4),
    request("plain", 33, temperature=0.0, max_tokens=25),
]

Answer = tuple[tuple[int, ...], object, object, float | None]


def run(engine: LLMEngine) -> dict[tuple[str, int], Answer]:
    for item in SEARCHES:
        engine.submit(item)
    answers: dict[tuple[str, int], Answer] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            before = answers.get((delta.request_id, delta.index), ((), None, None, None))[0]
            total = delta.cumulative_logprob
            answers[delta.request_id, delta.index] = (
                (*before, *delta.token_ids),
                delta.finish_reason,
                delta.logprobs and [[one.token_id for one in each.top] for each in delta.logprobs],
                total and round(total, 3),
            )
        engine.check_invariants()
    assert engine.stats().blocks_active == 0
    return answers


def test_answers_are_those_of_the_synchronous_runner(tiny_llama: Path) -> None:
    assert run(load(tiny_llama, LateDevice())) == run(load(tiny_llama, None))


def test_searches_that_had_to_make_room_find_the_same(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronous = load(tiny_llama, None)
    block_bytes = synchronous.info.kv_bytes // synchronous.info.num_blocks
    expected = run(synchronous)
    monkeypatch.setattr(turns, "may_admit", lambda cost, num_free, promised: cost <= num_free)
    tight = load(tiny_llama, LateDevice(), kv_cache_memory=17 * block_bytes)
    assert run(tight) == expected
    assert tight.stats().preemptions_total > 0
