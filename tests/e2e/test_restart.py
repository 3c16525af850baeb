"""A restarted server answers a long prompt from what the one before left on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from appliance.engine.tiers.write_behind import ON_DISK
from tests.e2e.conftest import Server


def ask(server: Server) -> dict[str, Any]:
    body = {
        "model": "small",
        "prompt": list(range(1000, 1400)),
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_long_prompt_outlives_the_server(smollm2_gguf: Path, tmp_path: Path) -> None:
    arguments = (
        str(smollm2_gguf),
        "--served-model-name",
        "small",
        "--kv-disk",
        str(tmp_path / "kv"),
    )
    first = Server(tmp_path / "log1", *arguments)
    before = ask(first)
    assert ask(first)["choices"] == before["choices"]
    # It has to end at once: it writes what is not written yet, for two seconds at most.
    assert first.stop() == 0
    assert str(tmp_path / "kv") in first.log
    assert ON_DISK in first.log
    kept = list((tmp_path / "kv").rglob("*.kv"))
    whole = 399 // 16
    assert 0 < len(kept) <= whole
    size = sum(file.stat().st_size for file in kept) / 2**20
    said = first.log.splitlines()[-1]
    assert re.match(rf"stopped; \d requests? served; {size:.1f} MiB of prompts and answers ", said)
    assert f" in {tmp_path / 'kv'} " in said
    second = Server(tmp_path / "log2", *arguments)
    try:
        after = ask(second)
        assert after["choices"] == before["choices"]
        cached = after["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 16 * whole if len(kept) == whole else cached <= 16 * len(kept)
        assert second.gauge("appliance_kv_disk_writing") == 1
    finally:
        assert second.stop() == 0
