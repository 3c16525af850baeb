"""Plans of a hub's models from kilobytes, with the client that downloads the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from large_model import write_large_model


def fit(model: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance", "fit", model, "--no-speed", "--json"],
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home / "hf"),
            "APPLIANCE_CACHE_DIR": str(home / "cache"),
            "PYTHONWARNINGS": "ignore",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_folder_is_planned_from_its_headers(hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    size = write_large_model(folder, hidden=512, middle=2048, layers=4, vocab=4096)
    hub.repos["org/model"] = {path.name: path.read_bytes() for path in folder.iterdir()}
    ran = fit("org/model", hub.url, tmp_path)
    assert ran.returncode == 0, ran.stderr
    first = json.loads(ran.stdout)["candidates"][0]
    assert first["bytes"]["weights"] == pytest.approx(size, rel=0.01)
    ranges = [wanted for _, path, wanted in hub.requests if path.endswith("model.safetensors")]
    assert len(ranges) == 2
    assert ranges[0] == "bytes=0-7"
    assert int(ranges[1].rpartition("-")[2]) < 10_000
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


@pytest.mark.model
def test_a_gguf_file_is_planned_from_its_beginning(
    hub: Any, tmp_path: Path, smollm2_gguf: Path
) -> None:
    hub.repos["org/model"] = {"a.gguf": smollm2_gguf.read_bytes(), "b.gguf": b"GGUF"}
    ran = fit("org/model:a.gguf", hub.url, tmp_path)
    assert ran.returncode == 0, ran.stderr
    ranges = [wanted for _, path, wanted in hub.requests if path.endswith("a.gguf")]
    assert ranges
    assert int(ranges[-1].rpartition("-")[2]) < smollm2_gguf.stat().st_size // 4


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


def test_what_cannot_be_planned_is_one_line(hub: Any, tmp_path: Path) -> None:
    hub.repos["org/model"] = {"config.json": b"{}", "model.safetensors": b"\xff" * 64}
    hub.repos["org/gated"] = {}
    hub.repos["org/several"] = {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}
    hub.refused.add("org/gated")
    models = [f"org/{name}" for name in ("model", "gated", "none", "several")]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFUSALS, *models],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    broken, gated, missing, several = ran.stdout.splitlines()
    assert "model.safetensors on the hub is no safetensors file" in broken
    assert "org/gated is gated" in gated
    assert "no model org/none" in missing
    assert "several GGUF files" in several
