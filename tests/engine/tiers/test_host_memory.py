"""Host memory for evicted and preempted blocks: the tiers get what the engine was planned with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from appliance.commands.serve_banner import banner
from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.load import memory_request
from appliance.engine.load.load_engine import load_llm_engine
from appliance.errors import MemoryPlanError

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def load(folder: Path, **options: Any) -> LLMEngine:
    config = EngineConfig(model=str(folder), threads=1, max_num_batched_tokens=64, **options)
    return load_llm_engine(
        config, eos_token_ids=(2,), metadata=None, on_progress=lambda stage, done, total: None
    )


def budget(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory_request, "memory_budget", lambda device, share: num_bytes)


def test_what_was_asked_for_is_there_and_told(tiny_llama: Path) -> None:
    engine = load(tiny_llama, kv_host_memory=3 * MIB)
    info = engine.info
    assert info.kv_host_bytes == 3 * MIB
    block_bytes = info.kv_bytes // info.num_blocks
    assert engine.stats().kv_host_capacity == 3 * MIB // block_bytes
    told = banner("http://x", "tiny", info)
    assert "up to 3 MiB of host memory for KV blocks that have to make room" in told
    there = banner("http://127.0.0.1:1", "tiny", info, network="http://192.168.1.4:1")
    assert "http://192.168.1.4:1/v1 from other machines" in there
    assert "other machines" not in told
    assert "host memory" not in banner("http://x", "tiny", load(tiny_llama, kv_host_memory=0).info)


def test_the_banner_says_what_the_engine_takes_in_all(tiny_llama: Path) -> None:
    info = load(tiny_llama).info
    (row,) = (line for line in banner("http://x", "m", info).splitlines() if "memory  " in line)
    listed = r"weights (\d+) \+ KV cache (\d+) \+ workspace (\d+) \+ Python and libraries ([\d,]+)"
    used = r"; [\d,]+ may be used\. This server takes [\d,]+ beside it"
    found = re.search(rf"([\d,]+) MiB once the KV cache is full: {listed}{used}", row)
    assert found is not None, row
    total, *parts = (int(number.replace(",", "")) for number in found.groups())
    assert abs(total - sum(parts)) <= 2, "rounded one by one"
    assert parts[-1] == round(info.process_bytes / MIB) > 50


def test_where_little_is_left_it_shrinks_and_says_so(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = load(tiny_llama).info
    assert not any("make room" in note for note in roomy.notes)
    used = roomy.weight_bytes + roomy.kv_bytes + roomy.workspace_bytes
    budget(monkeypatch, used + MIB // 2)
    tight = load(tiny_llama).info
    assert 0 < tight.kv_host_bytes < MIB
    assert any(
        "host memory are left for sequences that have to make room" in n for n in tight.notes
    )


def test_what_does_not_fit_beside_the_cache_is_refused(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roomy = load(tiny_llama).info
    needed = roomy.weight_bytes + roomy.kv_bytes + roomy.workspace_bytes
    budget(monkeypatch, needed + 4 * MIB)
    with pytest.raises(MemoryPlanError, match=r"100\.0 MiB for blocks that make room"):
        load(tiny_llama, kv_host_memory=100 * MIB)
