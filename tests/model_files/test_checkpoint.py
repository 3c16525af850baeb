from __future__ import annotations

import errno
import json
import logging
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from appliance.errors import ApplianceError, CheckpointError, UnsupportedModelError
from appliance.kernels.arrays import dtype_name
from appliance.model_files.checkpoint import SafetensorsFolder, write_json, write_safetensors

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.linspace(-3, 3, 10).view(5, 2).to(torch.bfloat16),
    "c.scale": torch.tensor(3.5, dtype=torch.float16),
    "d.codes": torch.arange(8, dtype=torch.int32),
    "e.empty": torch.empty(0, 4),
    "f.fp8": torch.tensor([1.0, -2.0, 448.0]).to(torch.float8_e4m3fn),
}


def folder_with(path: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return path


def sharded(path: Path, *, weight_map: dict[str, str] | None = None) -> Path:
    folder_with(path)
    names = list(TENSORS)
    shards = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for shard, members in shards.items():
        save_file({name: TENSORS[name] for name in members}, path / shard)
    full = {name: shard for shard, members in shards.items() for name in members}
    index = {"metadata": {}, "weight_map": full | (weight_map or {})}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def assert_same(folder: SafetensorsFolder) -> None:
    assert set(folder.tensor_names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        loaded = folder.load(name)
        assert folder.shape(name) == tuple(expected.shape) == tuple(loaded.shape)
        assert loaded.dtype is expected.dtype
        assert folder.dtype(name) == dtype_name(expected.dtype)
        assert torch.equal(loaded.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


def test_single_file(tmp_path: Path) -> None:
    folder = SafetensorsFolder(folder_with(tmp_path, TENSORS, hidden_size=64))
    assert folder.config == {"model_type": "llama", "hidden_size": 64}
    assert_same(folder)


def test_shards(tmp_path: Path) -> None:
    assert_same(SafetensorsFolder(sharded(tmp_path)))


def test_written_files_are_read_back_by_the_library(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {**TENSORS, "t": TENSORS["a.weight"].t()}, {"made_by": "test"})
    write_json(tmp_path / "config.json", {"model_type": "llama", "name": "é"})
    theirs = load_file(path)
    assert torch.equal(theirs["t"], TENSORS["a.weight"].t())
    folder = SafetensorsFolder(tmp_path)
    assert torch.equal(folder.load("t"), theirs["t"])
    assert folder.config["name"] == "é"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"version": 1})

    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_json(path, {"version": 2})
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_safetensors(tmp_path / "model.safetensors", TENSORS)
    assert json.loads(path.read_text()) == {"version": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_auto_map_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "modeling_evil.py").write_text(
        f"open({str(tmp_path / 'marker')!r}, 'w').write('run')"
    )
    folder_with(tmp_path, TENSORS, auto_map={"AutoModel": "modeling_evil.Evil"})
    with caplog.at_level(logging.WARNING):
        assert_same(SafetensorsFolder(tmp_path))
    assert "auto_map is ignored" in caplog.text
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickled_weights_are_refused_and_never_opened(tmp_path: Path, suffix: str) -> None:
    marker = tmp_path / "marker"
    # Code that `pickle` would run: os.mkdir(marker), in its protocol 0.
    (tmp_path / f"pytorch_model.{suffix}").write_text(f"cos\nmkdir\n(S'{marker}'\ntR.")
    folder_with(tmp_path)
    with pytest.raises(CheckpointError, match=r"only pickled weights.*safetensors or GGUF"):
        SafetensorsFolder(tmp_path)
    assert not marker.exists()


def test_safetensors_win_over_pickled_weights(tmp_path: Path) -> None:
    folder_with(tmp_path, TENSORS)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert_same(SafetensorsFolder(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", None, "No such file or directory; download it"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[1]", "must hold a JSON object"),
        ("config.json", b"[" * 100_000, "recursion"),
        ("config.json", b"\xff\xfe\x00\x01", "not valid JSON"),
        ("model.safetensors", None, "holds no weights"),
    ],
)
def test_folder_level_damage(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    folder_with(tmp_path, TENSORS)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFolder(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard model-2\.safetensors is missing"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"ghost.weight": "model-1.safetensors"}, r"'ghost\.weight' is not in model-1"),
        ({"a.weight": "model-2.safetensors"}, r"'a\.weight' is not in model-2"),
        ({"x": "../model-1.safetensors"}, "no shard"),
        ({"x": "/etc/passwd"}, "no shard"),
        ({"x": 7}, "no usable weight_map"),
    ],
)
def test_index_that_does_not_match(tmp_path: Path, weight_map: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        SafetensorsFolder(sharded(tmp_path, weight_map=weight_map))


def test_one_name_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file(
        {"a.weight": torch.zeros(1), **{n: TENSORS[n] for n in list(TENSORS)[3:]}},
        tmp_path / "model-2.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"'a\.weight' is in both"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("gptq_model-4bit-128g.safetensors", True),
        ("model-00001-of-00001.safetensors", True),
        ("adapter_model.safetensors", False),
    ],
)
def test_one_file_of_another_name_is_the_model(tmp_path: Path, name: str, is_read: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / name)
    if is_read:
        assert SafetensorsFolder(tmp_path).tensor_names() == list(load_file(tmp_path / name))
    else:
        with pytest.raises(CheckpointError, match="neither"):
            SafetensorsFolder(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    (sharded(tmp_path) / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        SafetensorsFolder(tmp_path)


def test_numbered_shards_without_an_index(tmp_path: Path) -> None:
    """huggingface_hub's own writer names and splits them, like published models."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(TENSORS, max_shard_size=40)
    assert len(split.filename_to_tensors) > 1
    (tmp_path / "config.json").write_text("{}")
    for shard, names in split.filename_to_tensors.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    assert_same(SafetensorsFolder(tmp_path))
    last = max(split.filename_to_tensors)
    (tmp_path / last).unlink()
    with pytest.raises(CheckpointError, match=f"shard {last} is missing"):
        SafetensorsFolder(tmp_path)


def raw_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


F32_0 = entry("F32", [2], 0, 8)

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "only 0 bytes"),
    "short": (b"\x01\x02", "only 2 bytes"),
    "header cut": (raw_file({"a": F32_0})[:20], "does not fit"),
    "huge length": (raw_file(b"{}", length=2**63), "does not fit"),
    "length over the limit": (raw_file(b"{}", length=10**9) + bytes(10), "does not fit"),
    "not json": (raw_file(b"{nope"), "not valid JSON"),
    "list": (raw_file([1]), "not a JSON object"),
    "duplicate key": (
        raw_file(b'{"a": 1, "a": 2}'),
        "'a' occurs twice",
    ),
    "deep": (raw_file(b"[" * 100_000), "recursion"),
    "no dtype": (raw_file({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "incomplete"),
    "entry is a list": (raw_file({"a": [1]}, bytes(8)), "incomplete"),
    "three offsets": (
        raw_file({"a": {**F32_0, "data_offsets": [0, 8, 9]}}, bytes(8)),
        "incomplete",
    ),
    "negative size": (raw_file({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "impossible shape"),
    "size of text": (raw_file({"a": entry("F32", ["2"], 0, 8)}, bytes(8)), "impossible shape"),
    "size true": (raw_file({"a": entry("F32", [True], 0, 4)}, bytes(4)), "impossible shape"),
    "extent too small": (raw_file({"a": entry("F32", [3], 0, 8)}, bytes(8)), "needs 12 bytes"),
    "huge shape": (
        raw_file({"a": entry("F32", [2**40, 2**40], 0, 8)}, bytes(8)),
        "needs 4835703278458516698824704 bytes",
    ),
    "negative offset": (raw_file({"a": entry("F32", [2], -8, 0)}, bytes(8)), "starts at byte"),
    "overlap": (
        raw_file({"a": F32_0, "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "'b' starts at byte",
    ),
    "hole": (raw_file({"a": F32_0, "b": entry("F32", [1], 12, 16)}, bytes(16)), "'b' starts"),
    "data cut": (raw_file({"a": F32_0}, bytes(7)), "tensors end at byte"),
    "extra byte": (raw_file({"a": F32_0}, bytes(9)), "tensors end at byte"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    content, reason = BAD_FILES[case]
    (folder_with(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFolder(tmp_path)
    message = str(caught.value)
    assert reason in message
    assert str(tmp_path / "model.safetensors") in message
    assert "download it again" in message
    assert "\n" not in message


def test_unknown_element_type(tmp_path: Path) -> None:
    content = raw_file({"a": entry("F4", [16], 0, 8)}, bytes(8))
    (folder_with(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedModelError, match="type F4; supported are F64"):
        SafetensorsFolder(tmp_path)


def test_a_file_cut_or_replaced_after_opening_is_an_error(tmp_path: Path) -> None:
    folder = SafetensorsFolder(folder_with(tmp_path, TENSORS))
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        folder.load("a.weight")
    weights.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        folder.load("a.weight")


def complaint(path: Path) -> str | None:
    try:
        folder = SafetensorsFolder(path)
        for name in folder.tensor_names():
            folder.load(name)
    except ApplianceError as error:
        return str(error)
    return None


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    weights = folder_with(tmp_path, TENSORS) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(content)))
        patch = data.draw(st.binary(max_size=4) | st.sampled_from([b"-", b"9", b'"', b"[", b"e9"]))
        content[position : position + data.draw(st.integers(0, 4))] = patch
    weights.write_bytes(content)
    message = complaint(tmp_path)
    assert message is None or str(weights) in message
