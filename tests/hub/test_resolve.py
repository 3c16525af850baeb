from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.errors import ModelError
from appliance.hub import HubName, resolve
from appliance.hub.packaged import PACKAGED


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record what would be downloaded, and from where."""
    asked: dict[str, Any] = {}

    def packaged(name: str, *, folder: Path, progress: Any) -> Path:
        asked["packaged"] = name, folder
        return folder / PACKAGED[name].filename

    def remote(name: HubName, progress: Any, *, images: bool, drafts: bool) -> Path:
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


def test_a_packaged_model_is_found_by_the_name_that_the_api_shows(
    tmp_path: Path, nothing_is_downloaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SmolLM2-135M-Instruct", "smollm2-135m-instruct", "SMOLLM2-135M"):
        assert find(name, tmp_path).name == "SmolLM2-135M-Instruct"
        assert nothing_is_downloaded.pop("packaged")[0] == "smollm2-135m"
        assert resolve.find_model(name, cache_dir=tmp_path) is None
    monkeypatch.chdir(tmp_path)
    Path("SmolLM2-135M-Instruct").mkdir()
    with pytest.raises(ModelError, match="SmolLM2-135M-Instruct"):  # a folder, without a model
        find("SmolLM2-135M-Instruct", tmp_path)


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


def archive(kind: str, suffix: str, folder: Path) -> bytes:
    """Return the archive that Python's archivers make of a folder."""
    (folder / "packed").mkdir()
    (folder / "packed" / "config.json").write_text("{}")
    shutil.make_archive(str(folder / "model"), kind, folder / "packed")
    return (folder / f"model.{suffix}").read_bytes()


def pickled(folder: Path) -> bytes:
    torch.save({"weight": torch.zeros(2)}, folder / "saved.pt")
    return (folder / "saved.pt").read_bytes()


FILES: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "weights alone": ("model.safetensors", lambda _: b"", "part of a model; give the folder"),
    "settings alone": ("config.json", lambda _: b"{}", "part of a model; give the folder"),
    "tokens alone": ("tokenizer.json", lambda _: b"{}", "part of a model; give the folder"),
    "torch.save": ("pytorch_model.bin", pickled, "pickled weights, which can run code"),
    "pickle": ("model.pkl", lambda _: b"\x80\x04}.", "pickled weights, which can run code"),
    "zip": ("m.zip", partial(archive, "zip", "zip"), "a zip archive; unpack it"),
    "tar": ("m.tar", partial(archive, "tar", "tar"), "an archive; unpack it"),
    "gzip": ("m.tgz", partial(archive, "gztar", "tar.gz"), "a compressed archive; unpack it"),
    "xz": ("m.txz", partial(archive, "xztar", "tar.xz"), "a compressed archive; unpack it"),
    # ggml's magic numbers are hexadecimal words: 'ggml' is 0x67676d6c and 'ggjt' 0x67676a74.
    "ggml": ("m.bin", lambda _: struct.pack("<I", 0x67676D6C), "a GGML file of before August 2023"),
    "ggjt": ("m.bin", lambda _: struct.pack("<I", 0x67676A74), "a GGML file of before August 2023"),
    "ONNX": ("m.onnx", lambda _: b"\x08\x07", "an ONNX model; take the model in safetensors"),
    "importance": ("imatrix.dat", lambda _: b"\1\0\0\0", "an importance matrix"),
    "Ollama's": ("Modelfile", lambda _: b"FROM ./m.gguf\n", "its FROM line names"),
    "pointer": (
        "m.bin",
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "a Git LFS pointer; fetch the file with `git lfs pull`",
    ),
    "text": ("notes.txt", lambda _: b"hello", "is no GGUF file; give a .gguf file or a folder"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_model_are_named_with_what_to_do(name: str, tmp_path: Path) -> None:
    file, content, reason = FILES[name]
    (tmp_path / file).write_bytes(content(tmp_path))
    with pytest.raises(ModelError, match=reason):
        find(str(tmp_path / file), tmp_path)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("model.safetensors.incomplete",), "an unfinished download, model.safetensors.inc"),
        (("onnx/model.onnx",), "an ONNX model"),
        (("zero_to_fp32.py", "latest"), "a checkpoint of DeepSpeed; run its zero_to_fp32.py"),
        (("__0_0.distcp", ".metadata"), "a training checkpoint in parts"),
        (("pytorch_model.bin",), "only pickled weights"),
        (("checkpoint-5/model.safetensors", "checkpoint-9/model.safetensors"),
         "give one: checkpoint-5, checkpoint-9"),
        (("refs/main", "snapshots/ab12/model.safetensors"), "give one: snapshots/ab12"),
        (("Q4/m.gguf", "README.md"), "give one: Q4"),
    ],
)  # fmt: skip
def test_folders_that_are_no_model_are_named_with_what_to_do(
    names: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=reason):
        find(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    "beside", ["mmproj-F16.gguf", "m.mmproj-f16.gguf", "mtp-m-Q4_K_M.gguf", "imatrix.gguf"]
)
def test_a_model_is_found_beside_the_files_that_belong_to_it(beside: str, tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", beside):
        (tmp_path / name).write_bytes(b"GGUF")
    assert find(str(tmp_path), tmp_path).path.name == "m-Q4_K_M.gguf"


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


def test_a_projector_file_is_no_model(tmp_path: Path) -> None:
    clip = b"GGUF\3\0\0\0" + bytes(16) + b"\x14" + bytes(7) + b"general.architecture"
    clip += b"\x08\0\0\0" + b"\x04" + bytes(7) + b"clip"
    for name in ("mmproj-F16.gguf", "vision.gguf"):
        (tmp_path / name).write_bytes(clip)
        with pytest.raises(ModelError, match=r"is a projector file.* give the model's own"):
            find(str(tmp_path / name), tmp_path)
        with pytest.raises(ModelError, match="is a projector file"):
            find(str(tmp_path), tmp_path)
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        assert find(str(tmp_path), tmp_path).name == "m", "the folder has one model"
        (tmp_path / "m.gguf").unlink()
        (tmp_path / name).unlink()


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
