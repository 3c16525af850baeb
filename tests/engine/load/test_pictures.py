"""Models whose pictures are not read say so, and serve texts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.gguf.picture_files import write_picture_files
from support.gguf.projector_files import write_projector
from support.models.towers import TOWER_CASES, with_tower

from appliance.config import EngineConfig
from appliance.engine.load.pictures import PictureSource, open_pictures
from appliance.engine.served_model import open_served
from appliance.errors import CheckpointError, ConfigError
from appliance.media.sizing import TokenRange

if TYPE_CHECKING:
    from pathlib import Path


PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
    },
    "qwen3_vl": {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16},
}
REASONS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3_vl", {}, {}, "has neither preprocessor_config.json nor"),
    ("qwen3_vl", {"image_processor_type": "Unheard"}, {}, "Unheard"),
    ("qwen3_vl", PROCESSORS["qwen3_vl"], {"ranks": 2}, "ranks divide this model"),
]


def write(kind: str, processor: dict[str, Any], folder: Path) -> Path:
    with_tower(TOWER_CASES[kind]).save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.mark.parametrize(("kind", "processor", "settings", "why"), REASONS)
def test_what_cannot_be_read_is_said(
    kind: str, processor: dict[str, Any], settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = EngineConfig(model=str(write(kind, processor, tmp_path)), device="cpu", **settings)
    found, notes = open_pictures(config, open_served(config))
    assert found is None
    (note,) = notes
    assert note.startswith("pictures are not read, and texts are served alone: ")
    assert why in note


def test_rows_that_see_each_other_need_room(tmp_path: Path) -> None:
    folder = write("gemma3", PROCESSORS["gemma3"], tmp_path)
    config = EngineConfig(model=str(folder), device="cpu")
    source = open_served(config)
    found, _ = open_pictures(config, source)
    assert found is not None
    assert found.uncut_rows == 16
    room = found.with_room(config).max_num_batched_tokens
    assert room == config.max_num_batched_tokens + 15


def test_a_tower_is_counted_and_can_be_left_out(tmp_path: Path) -> None:
    folder = write("qwen3_vl", PROCESSORS["qwen3_vl"], tmp_path)
    config = EngineConfig(model=str(folder), device="cpu")
    source = open_served(config)
    found, notes = open_pictures(config, source)
    assert found is not None
    assert not notes
    stored = found.tower.weights
    weights = sum(4 * _count(stored.shape(name)) for name in stored.tensor_names())
    assert found.num_bytes(4, 512, 1, in_library=True) > weights > 4 * 10_000
    assert source.spec.has_axes
    assert not any("are left out" in note for note in source.weights.notes())
    alone = EngineConfig(model=str(folder), device="cpu", images=False)
    texts = open_served(alone)
    assert open_pictures(alone, texts) == (None, ())
    assert not texts.spec.has_axes
    assert any("are left out" in note for note in texts.weights.notes())


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *dict.fromkeys(("0:8", "4:0", "x", "1:2:3", "-1:"), "must be LEAST:MOST").items(),
        ("9:3", "LEAST must not exceed MOST"),
    ],
)
def test_a_senseless_range_of_rows_is_refused(text: str, why: str, tmp_path: Path) -> None:
    folder = write("qwen3_vl", PROCESSORS["qwen3_vl"], tmp_path)
    config = EngineConfig(model=str(folder), device="cpu", image_tokens=text)
    with pytest.raises(ConfigError, match=f"image_tokens is '{text}', but {why}"):
        open_pictures(config, open_served(config))


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [("", 1, None), ("64:900", 64, 900), (":256", 1, 256), ("9:", 9, None)],
)
def test_a_range_of_rows_is_read_and_kept(
    text: str, least: int, most: int | None, tmp_path: Path
) -> None:
    assert TokenRange.of(text) == (least, most)
    folder = write("qwen3_vl", PROCESSORS["qwen3_vl"], tmp_path)
    config = EngineConfig(model=str(folder), device="cpu", image_tokens=text)
    found, _ = open_pictures(config, open_served(config))
    assert found is not None
    for size in ((40, 40), (300, 500), (3000, 2000)):
        rows = found.processor.rows(found.processor.canvases(*size))
        assert least <= rows <= (most or 16384)


HALF: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
HALF |= {"size": {"longest_edge": 112}}


def load(path: Path, **settings: Any) -> tuple[PictureSource | None, Any]:
    config = EngineConfig(model=str(path), device="cpu", **settings)
    return open_pictures(config, open_served(config))


def test_a_projector_file_beside_a_gguf_model_is_taken_and_counted(tmp_path: Path) -> None:
    model = with_tower(TOWER_CASES["qwen3_vl"])
    path = write_picture_files(tmp_path, model, HALF)
    found, notes = load(path)
    assert found is not None
    assert not notes
    stored = found.tower.weights
    weights = sum(4 * _count(stored.shape(name)) for name in stored.tensor_names())
    assert found.num_bytes(4, 512, 1, in_library=True) > weights > 4 * 10_000
    config = EngineConfig(model=str(path), device="cpu")
    assert open_served(config).spec.has_axes
    assert load(path, images=False) == (None, ())
    larger = tmp_path / "mmproj-F16.gguf"
    larger.write_bytes((tmp_path / "mmproj-F32.gguf").read_bytes())
    found, notes = load(path)
    assert found is not None
    assert found.tower.layers.path == larger, "no bit width is nearest to 0"
    assert notes == (
        "pictures are read with mmproj-F16.gguf, the nearest to the model; beside it are"
        " mmproj-F32.gguf, which --mmproj can name",
    )
    found, notes = load(path, mmproj=str(tmp_path / "mmproj-F32.gguf"))
    assert found is not None
    assert found.tower.layers.path.name == "mmproj-F32.gguf"
    assert not notes


def test_a_model_whose_projector_file_is_missing_says_how_to_add_it(tmp_path: Path) -> None:
    path = write_picture_files(tmp_path, with_tower(TOWER_CASES["qwen3_vl"]), HALF)
    (tmp_path / "mmproj-F32.gguf").unlink()
    found, (note,) = load(path)
    assert found is None
    assert "no projector file is beside model.gguf; put its publisher's mmproj file into" in note
    assert "--mmproj" in note
    other = tmp_path / "other"
    other.mkdir()
    texts = write_picture_files(other, with_tower(TOWER_CASES["smolvlm"]), HALF)
    (other / "mmproj-F32.gguf").unlink()
    assert load(texts) == (None, ()), "most models of this architecture read texts alone"


def test_a_projector_file_of_another_model_is_said_or_refused(tmp_path: Path) -> None:
    path = write_picture_files(tmp_path, with_tower(TOWER_CASES["smolvlm"]), HALF)
    case = TOWER_CASES["smolvlm"]
    wider = with_tower(replace(case, text={"hidden_size": 96}))
    write_projector(tmp_path / "mmproj-F32.gguf", wider, HALF)
    found, (note,) = load(path)
    assert found is None
    assert "it makes rows of width 96, and the model's are 64 wide" in note
    with pytest.raises(CheckpointError, match="rows of width 96"):
        load(path, mmproj=str(tmp_path / "mmproj-F32.gguf"))
    with pytest.raises(ConfigError, match="there is no such file"):
        load(path, mmproj=str(tmp_path / "none.gguf"))


def test_pictures_that_are_asked_for_by_file_are_not_left_out(tmp_path: Path) -> None:
    path = write_picture_files(tmp_path, with_tower(TOWER_CASES["smolvlm"]), HALF)
    file = str(tmp_path / "mmproj-F32.gguf")
    with pytest.raises(ConfigError, match="ranks divide this model"):
        load(path, mmproj=file, ranks=2)
    folder = write("qwen3_vl", PROCESSORS["qwen3_vl"], tmp_path / "folder")
    with pytest.raises(ConfigError, match="is a folder, which has its own vision tower"):
        load(folder, mmproj=file)
