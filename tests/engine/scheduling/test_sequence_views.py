"""Each sequence is reported in the state that fits it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.tiers import write_behind
from appliance.stats import SEQUENCE_STATES

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.stats import EngineStats, SequenceView

Seen = list[tuple["EngineStats", tuple["SequenceView", ...]]]


def load(folder: Path, **options: Any) -> LLMEngine:
    settings = {"threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64, **options}
    config = EngineConfig(model=str(folder), kv_cache_dtype="int8", **settings)
    return load_llm_engine(config, (), None, lambda *_: None, None)


def tight(folder: Path, **options: Any) -> LLMEngine:
    """Room for two of the requests of `crowd`, the longest of which takes 133 tokens."""
    info = load(folder).info
    size = 256 // info.block_size * (info.kv_bytes // info.num_blocks)
    return load(folder, kv_cache_memory=size, max_model_len=160, **options)


def request(name: str, length: int, **sampling: Any) -> Request:
    generator = torch.Generator().manual_seed(length)
    tokens = tuple(torch.randint(3, 512, (length,), generator=generator).tolist())
    settings = {"max_tokens": 70, "ignore_eos": True, **sampling}
    return Request(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(**settings))


def crowd() -> list[Request]:
    return [request(f"r{i}", 60 + i) for i in range(4)]


def watched(engine: LLMEngine, *requests: Request) -> Seen:
    """The reports after each step."""
    for item in requests:
        engine.submit(item)
    seen = [(engine.stats(), engine.sequences())]
    while engine.has_work:
        engine.step()
        seen.append((engine.stats(), engine.sequences()))
    return seen


def states(seen: Seen) -> set[str]:
    found = {view.status for _, views in seen for view in views}
    assert found <= set(SEQUENCE_STATES)
    return found


def test_swapped_sequences_say_what_is_kept_of_them_and_where(tiny_llama: Path) -> None:
    seen = watched(tight(tiny_llama), *crowd())
    assert states(seen) == {"waiting", "running", "swapped"}
    swapped = [(stats, [v for v in views if v.status == "swapped"]) for stats, views in seen]
    assert all(stats.swapped == len(views) for stats, views in swapped)
    assert all(view.kept_tokens > 0 == view.blocks for _, views in swapped for view in views)
    # The requests share nothing, so that each block in host memory belongs to one sequence.
    assert all(s.kv_host_swapped == sum(v.host_blocks for v in views) for s, views in seen)
    assert any(view.host_blocks > 1 for _, views in swapped for view in views)
    last, _ = seen[-1]
    assert (last.swapped, last.kv_host_swapped) == (0, 0)


def test_without_host_memory_they_are_preempted(tiny_llama: Path) -> None:
    seen = watched(tight(tiny_llama, kv_host_memory=0), *crowd())
    assert states(seen) == {"waiting", "running", "preempted"}
    assert all(s.swapped == s.kv_host_swapped == 0 for s, _ in seen)


def test_beams_without_blocks_wait_to_fork(tiny_llama: Path) -> None:
    engine = load(tiny_llama)
    seen = watched(engine, request("b", 150, use_beam_search=True, n=3, max_tokens=8))
    assert states(seen) == {"waiting", "running", "to fork"}
    assert all((v.status == "running") == (v.blocks > 0) for _, views in seen for v in views)


def test_what_the_disk_has_is_waited_for(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "MIN_TOKENS", 64)
    first = load(tiny_llama, kv_disk=str(tmp_path))
    for _ in range(2):  # content is written when it occurs the second time
        watched(first, request("a", 250, max_tokens=2))
    first.close()
    again = load(tiny_llama, kv_disk=str(tmp_path))
    again.submit(request("a", 250, max_tokens=2))
    assert [view.status for view in again.sequences()] == ["reading"]
    seen = watched(again)
    assert "running" in states(seen)
    assert seen[-1][0].prefix_hits_disk_total > 200
    again.close()
