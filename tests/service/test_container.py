"""Files for docker: their form and content; no image is built here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from appliance.service.container import DOCKERFILE, container_files

INSTRUCTIONS = {
    "FROM", "RUN", "COPY", "ARG", "USER", "ENV", "VOLUME", "EXPOSE", "STOPSIGNAL",
    "HEALTHCHECK", "ENTRYPOINT",
}  # fmt: skip


def service(tmp_path: Path, model: str = "") -> tuple[dict[str, object], dict[str, object]]:
    files = container_files(tmp_path, tmp_path / "out", model, 45)
    assert files.keys() == {"Dockerfile", "compose.yaml", "compose.gpu.yaml"}
    plain, gpu = (yaml.safe_load(files[name]) for name in ("compose.yaml", "compose.gpu.yaml"))
    return plain["services"]["appliance"], gpu["services"]["appliance"]


def test_a_model_of_this_machine_is_mounted(tmp_path: Path) -> None:
    path = tmp_path / 'my "model".gguf'
    path.touch()
    plain, _ = service(tmp_path, str(path))
    assert plain["command"] == [f"/models/{path.name}"]
    assert plain["volumes"] == ["cache:/cache", f"{path}:/models/{path.name}:ro"]
    for model, command in (("org/name", ["org/name"]), ("", [])):
        plain, _ = service(tmp_path, model)
        assert (plain["command"], plain["volumes"]) == (command, ["cache:/cache"])


def test_gpus_are_reserved_by_a_file_of_their_own(tmp_path: Path) -> None:
    plain, gpu = service(tmp_path)
    assert "deploy" not in plain
    assert gpu["deploy"] == {
        "resources": {
            "reservations": {
                "devices": [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
            }
        }
    }
    assert plain["stop_grace_period"] == "45s"
    assert str(plain["environment"]).count(":?") == 1  # no server without a key


def test_the_image_runs_without_root_and_needs_a_key() -> None:
    logical = DOCKERFILE.replace("\\\n", " ").splitlines()
    words = [line.split()[0] for line in logical if line and not line.startswith("#")]
    assert set(words) <= INSTRUCTIONS
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert not re.search(r"USER\s+(root|0)\b", DOCKERFILE)
    assert "APPLIANCE_HOST=0.0.0.0" in DOCKERFILE
    assert "API_KEY" not in DOCKERFILE


@pytest.mark.parametrize("word", ["gcc", "--no-install-recommends", "rm -rf /var/lib/apt/lists"])
def test_the_cpu_library_is_compiled_in_the_image(word: str) -> None:
    assert word in DOCKERFILE
