"""Plans of a hub's models from kilobytes, with the client that downloads the rest."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gguf.ggml_models import write_llama
from support.gguf.gguf_files import with_tokenizer
from support.gguf.head_files import write_apart, write_file_with_head
from support.gguf.picture_files import write_picture_files
from support.models.large_model import write_large_model
from support.models.towers import TOWER_CASES, with_tower
from support.runs.forked_commands import ForkedCommands

Fit = Callable[..., dict[str, Any]]


@pytest.fixture
def fit(commands: ForkedCommands, hub: Any, tmp_path: Path) -> Fit:
    """Plan a model of the hub, and return the output, parsed from JSON."""

    def fit(model: str, *flags: str) -> dict[str, Any]:
        home, cache = str(tmp_path / "hf"), str(tmp_path / "cache")
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": home, "APPLIANCE_CACHE_DIR": cache}
        ran = commands.run("fit", model, "--no-speed", "--json", *flags, **places)
        assert ran.returncode == 0, ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout)
        return found

    return fit


def test_a_folder_is_planned_from_its_headers(fit: Fit, hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    size = write_large_model(folder, hidden=512, middle=2048, layers=4, vocab=4096)
    hub.repos["org/model"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    first = fit("org/model")["candidates"][0]
    assert first["bytes"]["weights"] == pytest.approx(size, rel=0.01)
    ranges = [wanted for _, path, wanted in hub.requests if path.endswith("model.safetensors")]
    assert len(ranges) == 2
    assert ranges[0] == "bytes=0-7"
    assert int(ranges[1].rpartition("-")[2]) < 10_000
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


@pytest.mark.model
def test_a_gguf_file_is_planned_from_its_beginning(fit: Fit, hub: Any, smollm2_gguf: Path) -> None:
    hub.repos["org/model"] = {"a.gguf": smollm2_gguf.read_bytes(), "b.gguf": b"GGUF"}
    assert fit("org/model:a.gguf")["candidates"]
    ranges = [wanted for _, path, wanted in hub.requests if path.endswith("a.gguf")]
    assert ranges
    assert int(ranges[-1].rpartition("-")[2]) < smollm2_gguf.stat().st_size // 4


def test_a_model_in_parts_is_planned_from_their_beginnings(
    fit: Fit, hub: Any, tmp_path: Path
) -> None:
    first = write_llama(tmp_path / "big.gguf", ["Q8_0"], per_part=9)
    parts = sorted(tmp_path.glob("big-*.gguf"))
    assert len(parts) == 4
    hub.repos["org/model"] = {part.name: part.read_bytes() for part in parts}
    whole = write_llama(tmp_path / "whole.gguf", ["Q8_0"])
    hub.repos["org/whole"] = {"a.gguf": whole.read_bytes()}
    planned, alike = fit(f"org/model:{first.name}"), fit("org/whole:a.gguf")
    weights = [one["candidates"][0]["bytes"]["weights"] for one in (planned, alike)]
    assert weights[0] == weights[1] > 1_000_000


def test_what_pictures_are_read_with_is_planned_too(fit: Fit, hub: Any, tmp_path: Path) -> None:
    settings = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": 112}}
    path = write_picture_files(tmp_path, with_tower(TOWER_CASES["qwen3_vl"]), settings)
    with_tokenizer(path, 128)
    files = {one.name: one.read_bytes() for one in (path, tmp_path / "mmproj-F32.gguf")}
    hub.repos["org/eyes"] = files
    with_pictures = fit("org/eyes:model.gguf")["candidates"][0]["bytes"]
    alone = fit("org/eyes:model.gguf", "--no-images")["candidates"][0]["bytes"]
    assert with_pictures["weights"] == alone["weights"]
    assert with_pictures["pictures"] > 256 << 20
    assert alone["pictures"] == 0


def test_what_a_model_drafts_with_is_planned_too(fit: Fit, hub: Any, tmp_path: Path) -> None:
    write_file_with_head("glm4_moe", tmp_path)
    model, head = tmp_path / "m.gguf", tmp_path / "mtp-m.gguf"
    write_apart(tmp_path / "model.gguf", model, head)
    with_tokenizer(model, 512)
    hub.repos["org/head"] = {one.name: one.read_bytes() for one in (model, head)}
    hub.repos["org/alone"] = {model.name: model.read_bytes()}
    drafting, alone = (fit(f"org/{one}")["candidates"][0]["bytes"] for one in ("head", "alone"))
    assert drafting["weights"] == alone["weights"]
    assert drafting["drafts"] > 0
    assert alone["drafts"] == 0
    parts = ("weights", "kv_cache", "states", "workspace", "pictures", "drafts", "process")
    for planned in (drafting, alone):
        assert planned["total"] == sum(planned[part] for part in parts)


REFUSALS = """
import sys, tempfile
from pathlib import Path
from appliance.errors import ModelError
from appliance.hub import HubName
from appliance.hub.headers import fetch_headers
for model in sys.argv[1:]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            fetch_headers(HubName.parse(model), Path(folder), print)
    except ModelError as error:
        print(error)
"""


def test_what_cannot_be_planned_is_one_line(
    commands: ForkedCommands, hub: Any, tmp_path: Path
) -> None:
    hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"\xff" * 64}
    hub.repos["org/gated"] = {}
    hub.repos["org/several"] = {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}
    hub.refused.add("org/gated")
    models = [f"org/{name}" for name in ("model", "gated", "none", "several")]
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    ran = commands.run(*models, code=REFUSALS, **places)
    assert ran.returncode == 0, ran.stderr
    broken, gated, missing, several = ran.stdout.splitlines()
    assert "model.safetensors on the hub is no safetensors file" in broken
    assert "org/gated is gated" in gated
    assert "no model org/none" in missing
    assert "several GGUF files" in several
