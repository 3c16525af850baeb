"""The projector file of a GGUF model, by the names that publishers give."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import pytest

from appliance.errors import ConfigError
from appliance.model_files.files_beside import (
    find_projector,
    nearest_first,
    projectors_beside,
    starts_as_projector,
)

if TYPE_CHECKING:
    from pathlib import Path

# Names as their publishers have them, and what llama.cpp's find_best_mmproj takes.
REPOSITORIES: dict[str, tuple[list[str], str, str | None]] = {
    "unsloth": (
        ["Qwen3-VL-8B-Instruct-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf",
         "mmproj-F32.gguf", "imatrix_unsloth.gguf_file"],
        "Qwen3-VL-8B-Instruct-Q4_K_M.gguf",
        "mmproj-BF16.gguf",
    ),
    "unsloth, in parts": (
        ["UD-Q4_K_XL/Qwen3.5-122B-A10B-UD-Q4_K_XL-00001-of-00003.gguf", "mmproj-F16.gguf"],
        "UD-Q4_K_XL/Qwen3.5-122B-A10B-UD-Q4_K_XL-00001-of-00003.gguf",
        "mmproj-F16.gguf",
    ),
    "ggml-org": (
        ["SmolVLM-500M-Instruct-Q8_0.gguf", "SmolVLM-500M-Instruct-f16.gguf",
         "mmproj-SmolVLM-500M-Instruct-Q8_0.gguf", "mmproj-SmolVLM-500M-Instruct-f16.gguf"],
        "SmolVLM-500M-Instruct-f16.gguf",
        "mmproj-SmolVLM-500M-Instruct-f16.gguf",
    ),
    "ggml-org, 8 bits": (
        ["mmproj-SmolVLM-500M-Instruct-f16.gguf", "mmproj-SmolVLM-500M-Instruct-Q8_0.gguf"],
        "SmolVLM-500M-Instruct-Q8_0.gguf",
        "mmproj-SmolVLM-500M-Instruct-Q8_0.gguf",
    ),
    "mradermacher": (
        ["gemma-3-4b-it.IQ4_XS.gguf", "gemma-3-4b-it.mmproj-f16.gguf",
         "gemma-3-4b-it.mmproj-Q8_0.gguf"],
        "gemma-3-4b-it.IQ4_XS.gguf",
        "gemma-3-4b-it.mmproj-Q8_0.gguf",
    ),
    "bartowski": (
        ["google_gemma-3-4b-it-Q6_K.gguf", "mmproj-google_gemma-3-4b-it-bf16.gguf",
         "mmproj-google_gemma-3-4b-it-f32.gguf"],
        "google_gemma-3-4b-it-Q6_K.gguf",
        "mmproj-google_gemma-3-4b-it-bf16.gguf",
    ),
    "a folder of its own": (
        ["a/m-Q4_0.gguf", "a/mmproj-F16.gguf", "mmproj-Q4_0.gguf", "b/mmproj-Q4_0.gguf"],
        "a/m-Q4_0.gguf",
        "a/mmproj-F16.gguf",
    ),
    "another model's": (
        ["Qwen3-VL-2B-Thinking-Q4_K_M.gguf", "mmproj-Qwen3-VL-2B-Instruct-Q8_0.gguf",
         "mmproj-Qwen3-VL-2B-Thinking-F16.gguf"],
        "Qwen3-VL-2B-Thinking-Q4_K_M.gguf",
        "mmproj-Qwen3-VL-2B-Thinking-F16.gguf",
    ),
    "none": (["m-Q4_0.gguf", "other/mmproj-F16.gguf"], "m-Q4_0.gguf", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REPOSITORIES)
def test_the_nearest_is_taken(name: str) -> None:
    names, model, wanted = REPOSITORIES[name]
    for order in (names, names[::-1]):
        assert next(iter(nearest_first(model, order)), None) == wanted


@pytest.mark.parametrize("name", REPOSITORIES)
def test_the_nearest_is_found_in_a_snapshot(name: str, tmp_path: Path) -> None:
    names, model, wanted = REPOSITORIES[name]
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    for one in {*names, model}:
        (snapshot / one).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / one).write_bytes(b"GGUF")
    assert find_projector(snapshot / model) == (None if wanted is None else snapshot / wanted)


def test_above_a_folder_that_is_no_snapshot_nothing_is_taken(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in ("m/m.gguf", "mmproj-F16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_projector(tmp_path / "m" / "m.gguf") is None


def write(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_file_whose_name_says_nothing_is_known_by_its_header(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", "llama")
    write(tmp_path / "draft.gguf", "qwen3")
    assert projectors_beside(model) == []
    own = write(tmp_path / "vision.gguf", "clip")
    assert starts_as_projector(own)
    assert not starts_as_projector(model)
    assert find_projector(model) == own
    named = write(tmp_path / "mmproj.gguf", "clip")
    assert find_projector(model) == named


def test_the_setting_goes_before_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "m.gguf", "llama")
    write(tmp_path / "mmproj.gguf", "clip")
    asked = write(tmp_path / "other.gguf", "clip")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_projector(model, str(asked)) == asked
    assert find_projector(model, "~/other.gguf") == asked
    with pytest.raises(ConfigError, match="there is no such file"):
        find_projector(model, str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match="is a folder, which has its own vision tower"):
        find_projector(tmp_path, str(asked))
    assert find_projector(tmp_path) is None
