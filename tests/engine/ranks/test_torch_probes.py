"""Torch ranks test the paths between them before they load, and avoid bad ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from support.models.sure_models import THREE_GROUPS, write_sure_model
from support.ranks.rank_engines import PROMPTS, answers, loaded

from appliance.engine.ranks import rank_group, torch_probes
from appliance.engine.ranks.link import LinkPath
from appliance.errors import EngineError

if TYPE_CHECKING:
    from typing import Any

BAD = Path(__file__).parents[2] / "support" / "support" / "ranks" / "bad_peers.py"
TORCH: dict[str, Any] = {"kernels": "torch", "kv_cache_dtype": "fp32", "max_model_len": 160}


@pytest.mark.usefixtures("exact_products")
def test_peers_that_hang_give_way_to_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on two GPUs: a process represents rank 0 in each test, and the reason is logged."""
    write_sure_model("llama", tmp_path, **THREE_GROUPS)
    with loaded(tmp_path, **TORCH) as alone:
        expected = answers(alone, PROMPTS[:1])
    monkeypatch.setattr(rank_group, "COMMAND", (sys.executable, str(BAD), "peers hang"))
    monkeypatch.setattr(torch_probes, "ways_of", lambda kind: (LinkPath.PEER, LinkPath.HOST))
    monkeypatch.setattr(torch_probes, "TRIAL_SECONDS", 12.0)
    monkeypatch.setattr(torch_probes, "MEET_SECONDS", 0.0)
    monkeypatch.delenv(torch_probes.WITHOUT_PEERS, raising=False)
    before = psutil.Process().children()
    with loaded(tmp_path, tensor_parallel=2, **TORCH) as engine:
        assert os.environ[torch_probes.WITHOUT_PEERS] == "1"
        assert len(psutil.Process().children()) == len(before) + 1, "the tests' processes are gone"
        reason = "peer to peer did not answer in time: 12 s"
        link = engine.info.ranks[1].link
        assert link is not None
        assert (link.path, link.reason) == (
            "through host memory",
            reason,
        )
        assert any(f", since {reason}" in words for words in engine.info.notes)
        assert "ranks meet through host memory: peer to peer did not answer" in caplog.text
        assert answers(engine, PROMPTS[:1]) == expected


def test_without_a_sound_way_the_start_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sure_model("llama", tmp_path, **THREE_GROUPS)
    monkeypatch.setattr(rank_group, "COMMAND", (sys.executable, str(BAD), "all change"))
    before = psutil.Process().children()
    with (
        pytest.raises(EngineError, match="no sound way between them: sockets of this machine chan"),
        loaded(tmp_path, tensor_parallel=2, **TORCH),
    ):
        pass
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("kind", "setting", "ways"),
    [
        ("cpu", None, [LinkPath.SOCKET]),
        ("cuda", None, [LinkPath.PEER, LinkPath.HOST]),
        ("cuda", "0", [LinkPath.PEER, LinkPath.HOST]),
        ("cuda", "1", [LinkPath.HOST]),
    ],
)
def test_ways_are_those_that_the_user_leaves(
    kind: str, setting: str | None, ways: list[LinkPath], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(torch_probes.WITHOUT_PEERS, raising=False)
    if setting is not None:
        monkeypatch.setenv(torch_probes.WITHOUT_PEERS, setting)
    assert list(torch_probes.ways_of(kind)) == ways
