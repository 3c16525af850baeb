"""Configured models that are unavailable: the server starts without them, and loads them later."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from support.runs.forked_commands import forked_commands

from tests.e2e.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.model
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DISABLE_TELEMETRY": "1"}


def tables(folder: Path, **models: str | Path) -> Path:
    path = folder / "config.toml"
    lines = [
        f'[models.{name}]\nmodel = "{of}"\nkv_cache_memory = "64MiB"\n'
        for name, of in models.items()
    ]
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def without(disk: Path, smollm2_gguf: Path) -> Iterator[Server]:
    """A server with six models, of which one is available and fits: not the first."""
    damaged = disk / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    config = tables(
        disk,
        hub="foo/bar",
        away=disk / "later" / "model.gguf",
        unnamed="no such thing",
        broken=damaged,
        here=smollm2_gguf,
    )
    with config.open("a") as settings:
        settings.write(f'[models.large]\nmodel = "{smollm2_gguf}"\nkv_cache_memory = "1MiB"\n')
        settings.write(f'[models.twice]\nmodel = "{disk}/gone"\nreplicas = 2\n')
    arguments = ("--config", str(config), "--max-model-len", "512")
    running = Server(disk / "log", *arguments, **NO_HUB, HF_HOME=str(disk / "hub"))
    yield running
    running.stop()


def ask(server: Server, model: str) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "prompt": "a", "max_tokens": 2}
    return server.client.post("/v1/completions", json=body)


def test_the_others_are_served_and_each_missing_one_says_why(without: Server, disk: Path) -> None:
    assert ask(without, "here").status_code == 200
    assert without.client.get("/health").status_code == 200
    for name, why in (
        ("hub", "foo/bar"),
        ("away", "model.gguf"),
        ("unnamed", "no such thing"),
        ("broken", "damaged.gguf"),
        ("large", "this does not fit: --kv-cache-memory asks for 1.0 MiB"),
        ("twice", f"{disk}/gone"),
    ):
        refused = ask(without, name)
        assert refused.status_code == 503, refused.text
        message = refused.json()["error"]["message"]
        assert f"the model '{name}' cannot be loaded: " in message
        assert why in message
        warned = [line for line in without.log.splitlines() if f"[models.{name}]" in line]
        assert len(warned) == 1 or name in ("broken", "large"), without.log
    states = {one["id"]: one["state"] for one in without.client.get("/v1/models").json()["data"]}
    assert states.pop("here") == "ready"
    assert set(states.values()) == {"failed"}


def test_a_model_that_appears_later_is_served(
    without: Server, disk: Path, smollm2_gguf: Path
) -> None:
    assert ask(without, "away").status_code == 503
    (disk / "later").mkdir()
    shutil.copy(smollm2_gguf, disk / "later" / "model.gguf")
    assert ask(without, "away").json()["model"] == "away"
    assert ask(without, "here").status_code == 200


def test_without_any_model_all_reasons_are_told(tmp_path: Path) -> None:
    config = tables(tmp_path, hub="foo/bar", away=tmp_path / "absent")
    with forked_commands(tmp_path) as commands:
        ended = commands.run("serve", "--port", "0", "--config", config, **NO_HUB)
    assert ended.returncode != 0
    (error,) = (line for line in ended.stderr.splitlines() if line.startswith("error: "))
    assert "none of the 2 models can be served" in error
    assert "[models.hub]: " in error
    assert "[models.away]: " in error
    assert "absent" in error
