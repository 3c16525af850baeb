from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import ModelError
from appliance.hub import HubName, resolve
from appliance.hub.packaged import PACKAGED


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record what would be fetched, and from where."""
    asked: dict[str, Any] = {}

    def packaged(name: str, *, folder: Path, progress: Any) -> Path:
        asked["packaged"] = name, folder
        return folder / PACKAGED[name].filename

    def remote(name: HubName, progress: Any) -> Path:
        asked["remote"] = name
        return Path("snapshot")

    monkeypatch.setattr(resolve, "fetch_packaged", packaged)
    monkeypatch.setattr("appliance.hub.remote.download", remote)
    return asked


def find(model: str, tmp_path: Path) -> resolve.ResolvedModel:
    return resolve.resolve_model(model, cache_dir=tmp_path / "cache")


def test_nothing_means_the_default_model(
    tmp_path: Path, nothing_is_downloaded: dict[str, Any]
) -> None:
    found = find("", tmp_path)
    assert nothing_is_downloaded["packaged"] == ("smollm2-135m", tmp_path / "cache" / "models")
    assert found.name == "SmolLM2-135M-Instruct"
    assert found.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert find("gemma3-270m", tmp_path).name == "gemma-3-270m"


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("org/name-GGUF:name-Q4_0.gguf", HubName("org/name-GGUF", None, "name-Q4_0.gguf")),
        ("org/name@v1:sub/name.gguf", HubName("org/name", "v1", "sub/name.gguf")),
    ],
)
def test_hub_ids(
    tmp_path: Path,
    nothing_is_downloaded: dict[str, Any],
    model: str,
    asked: HubName,
) -> None:
    found = find(model, tmp_path)
    assert nothing_is_downloaded["remote"] == asked
    assert found == resolve.ResolvedModel(Path("snapshot"), asked.repo)


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    gguf = folder / "tiny.Q4_0.gguf"
    gguf.write_bytes(b"GGUF")
    assert find(str(gguf), tmp_path) == resolve.ResolvedModel(gguf, "tiny.Q4_0")
    assert find(str(folder), tmp_path).path == gguf
    (folder / "model.safetensors").write_bytes(b"")
    assert find(str(folder), tmp_path) == resolve.ResolvedModel(folder, "my-model")
    blob = tmp_path / "blob-without-suffix"
    blob.write_bytes(b"GGUF....")
    assert find(str(blob), tmp_path).path == blob


def test_an_empty_gguf_file_is_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    assert find(str(tmp_path / "empty.gguf"), tmp_path).name == "empty"


def test_folders_that_are_not_clear(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor a \.gguf file"):
        find(str(tmp_path), tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files.*: a\.gguf, b\.gguf"):
        find(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.safetensors", "give the folder that holds it"),
        ("config.json", "give the folder that holds it"),
        ("pytorch_model.bin", "is no GGUF file"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=reason):
        find(str(tmp_path / name), tmp_path)


@pytest.mark.parametrize(
    "model",
    ["nothing", "./missing", "/missing/model.gguf", "models/typo.gguf", "a/b/c", "org/", "../x/y z",
     "org/name:file.bin", "https://hub/org/name", "x" * 5000, "a\0b", "org/../../etc"],
)  # fmt: skip
def test_what_is_no_model_says_what_is(
    tmp_path: Path, nothing_is_downloaded: dict[str, Any], model: str
) -> None:
    with pytest.raises(ModelError) as caught:
        find(model, tmp_path)
    assert "a folder, a .gguf file, a hub id" in str(caught.value) or "cannot read" in str(
        caught.value
    )
    assert nothing_is_downloaded == {}


def test_a_model_is_found_by_any_part_or_what_their_names_begin_with(tmp_path: Path) -> None:
    parts = [tmp_path / f"big [Q4]-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF")
    for named in (*parts, tmp_path / "big [Q4]", tmp_path):
        found = find(str(named), tmp_path)
        assert (found.path, found.name) == (parts[0], "big [Q4]")
    (tmp_path / "other.GGUF").write_bytes(b"GGUF")
    assert find(str(tmp_path / "other.GGUF"), tmp_path).name == "other"
    with pytest.raises(ModelError, match=r"several GGUF files.*: big \[Q4\]-00001.*, other.GGUF"):
        find(str(tmp_path), tmp_path)
    parts[0].unlink()
    assert find(str(parts[1]), tmp_path).path == parts[1], "the loader names what is missing"


def test_near_names_are_offered(tmp_path: Path) -> None:
    (tmp_path / "SmolLM2-135M.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"did you mean .*SmolLM2-135M\.Q4_1\.gguf\?"):
        find(str(tmp_path / "SmolLM2-135M-Q4_1.gguf"), tmp_path)


def test_a_drive_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="plug in or mount its drive") as caught:
        find(str(tmp_path / "usb" / "models" / "a.gguf"), tmp_path)
    assert f"there is no {tmp_path / 'usb'} either" in str(caught.value)
    with pytest.raises(ModelError) as near:
        find("no/such/file.gguf", tmp_path)
    assert "drive" not in str(near.value)


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, appliance.hub\n"
        "heavy = {'huggingface_hub', 'httpx', 'requests', 'torch', 'transformers', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_is_recommended_for_a_packaged_model_goes_with_its_file(
    tmp_path: Path, nothing_is_downloaded: dict[str, Any]
) -> None:
    known = PACKAGED["smollm2-135m"]
    recommended = {"temperature": 0.2, "top_p": 0.9}
    assert find("", tmp_path).sampling.values == recommended
    file = tmp_path / known.filename
    with file.open("wb") as made:
        made.write(b"GGUF")
        made.truncate(known.size)
    assert find(str(file), tmp_path).sampling.values == recommended
    assert not find(str(file.rename(tmp_path / "other.gguf")), tmp_path).sampling
    with file.open("wb") as made:
        made.write(b"GGUF")
    assert not find(str(file), tmp_path).sampling, "another file of this name"
