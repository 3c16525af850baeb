"""Projector files that are written are those of llama.cpp's converter, of the same models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf.projector_files import as_published, is_written, q8_0, write_projector
from support.models.picture_models import write_picture_model
from support.models.towers import TOWER_CASES, TowerCase, text_of, with_tower

from appliance.errors import QuantizeError
from appliance.model.source import open_model
from appliance.model.vision.source import open_projector, open_tower
from appliance.model.vision.torch_tower import load_torch_tower
from appliance.model.vision.tower import PatchGrid
from appliance.model_files.files_beside import find_projector
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.gguf.from_checkpoint import unlike
from appliance.quant.gguf.projector import plan_projector
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model

READ_ONLY = "gemma4_unified"  # without layers
CASES = [name for name, case in TOWER_CASES.items() if is_written(case) and name != READ_ONLY]
_CLIP = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.26, 0.26, 0.27]}
_AREA = _CLIP | {"size": {"shortest_edge": 3136, "longest_edge": 78400}}
_SPLIT = _CLIP | {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
# Each image processor's class, and settings.
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvlm": ("SmolVLMImageProcessor", _SPLIT),
    "idefics3": ("Idefics3ImageProcessor", _SPLIT | {"max_image_size": {"longest_edge": 42}}),
    "gemma3": ("Gemma3ImageProcessor", _CLIP | {"size": {"height": 56, "width": 56}}),
    "gemma4": (
        "Gemma4ImageProcessor",
        {"patch_size": 4, "image_mean": [0.0] * 3, "image_std": [1.0] * 3},
    ),
    "lfm2_vl": ("Lfm2VlImageProcessor", _CLIP | {"encoder_patch_size": 4}),
    "glm4v_moe": ("Glm4vImageProcessor", _AREA),
    "paddleocr_vl": ("PaddleOCRVLImageProcessor", _AREA),
    "internvl": ("GotOcr2ImageProcessor", _CLIP | {"size": {"height": 56, "width": 56}}),
    "qwen2_vl": ("Qwen2VLImageProcessor", _AREA),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", _AREA),
    "qwen3_vl": ("Qwen2VLImageProcessor", _AREA | {"patch_size": 16}),
    "qwen3_5": ("Qwen2VLImageProcessor", _AREA | {"patch_size": 16}),
    "mistral3": ("PixtralImageProcessor", _CLIP | {"size": {"longest_edge": 140}}),
}
# Where the converter writes what nothing reads, some of it of the text.
OWN = {
    "feed_forward_length": {"qwen2_vl", "qwen2_5_vl", "glm4v_moe"},
    "layer_norm_epsilon": {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"},
    "image_size": {"lfm2_vl", "paddleocr_vl"},
    "projector_type": {"gemma4"},  # for pictures alone, as the converter has it
}


def folder_of(case: TowerCase, folder: Path) -> Any:
    """Write a model whose numbers float16 has, and its image processor; return it."""
    model = with_tower(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    model.save_pretrained(folder)
    name, settings = PROCESSORS[case.kind]
    content = settings | {"image_processor_type": name}
    if case.kind == "internvl":
        side = model.config.vision_config.image_size[0]
        content |= {"size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_what_the_converter_writes(name: str, tmp_path: Path) -> None:
    case = as_published(TOWER_CASES[name])
    folder = tmp_path / "model"
    model = folder_of(case, folder)
    planned = plan_projector(open_model(folder))
    assert planned is not None
    planned.write(tmp_path / "own.gguf")
    _, processor = PROCESSORS[case.kind]
    converted = gguf.GGUFReader(write_projector(tmp_path / "converted.gguf", model, processor))
    own = gguf.GGUFReader(tmp_path / "mmproj-own.gguf")
    for key, field in converted.fields.items():
        ending = key.rpartition(".")[2]
        if key.startswith("GGUF.") or case.kind in OWN.get(ending, ()):
            continue
        value = field.contents()
        near = value if isinstance(value, str) else pytest.approx(value, rel=1e-6)
        assert own.fields[key].contents() == near, key
    wanted = {tensor.name: tensor for tensor in converted.tensors}
    found = {tensor.name: tensor for tensor in own.tensors}
    assert found.keys() == wanted.keys() - {"v.token_embd.img_break"}
    for stored, tensor in found.items():
        assert [*tensor.shape] == [*wanted[stored].shape], stored
        assert np.array_equal(tensor.data.astype(np.float32), wanted[stored].data), stored
    read = open_projector(tmp_path / "mmproj-own.gguf", text_of(folder, case.kind)).spec
    assert [*unlike("tower", planned.spec, read)] == []


def rows_of(source: Any, case: TowerCase) -> np.ndarray:
    rows, columns = case.grids[0]
    patches = np.random.default_rng(3).normal(size=(rows * columns, source.spec.patch.inputs))
    tower = load_torch_tower(source, torch.device("cpu"), torch.float32)
    return np.asarray(tower([PatchGrid(patches.astype(np.float32), rows, columns)])[0].embeddings)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "internvl"])
def test_quantize_writes_it_beside_the_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = as_published(TOWER_CASES[kind])
    monkeypatch.setitem(TOWER_CASES, kind, case)
    folder = write_picture_model(kind, tmp_path / "model", merges=(("a", "b"),))
    report = quantize_model(folder, tmp_path / "out", QuantizeOptions.of_type("Q8_0"))
    assert not [note for note in report.notes if "text" in note]
    assert sorted(one.name for one in report.out.parent.iterdir()) == [
        "mmproj-out.gguf",
        "out.gguf",
    ]
    found = find_projector(report.out)
    assert found == report.out.parent / "mmproj-out.gguf"
    read, whole = open_projector(found, open_model(report.out)), open_tower(folder)
    assert np.allclose(rows_of(read, case), rows_of(whole, case), atol=2e-2)


def test_a_gguf_models_own_is_copied(tmp_path: Path) -> None:
    folder = write_picture_model("qwen3_vl", tmp_path / "model", merges=(("a", "b"),))
    first = quantize_model(folder, tmp_path / "first", QuantizeOptions.of_type("Q8_0")).out
    report = quantize_model(first, tmp_path / "second", QuantizeOptions.of_type("Q4_0"))
    assert "mmproj-first.gguf is copied, for pictures" in report.notes
    own, copied = find_projector(first), find_projector(report.out)
    assert own is not None
    assert copied is not None
    assert own.read_bytes() == copied.read_bytes()
    scheme = QuantizeOptions(WeightScheme(8, 32))
    report = quantize_model(first, tmp_path / "folder", scheme)
    assert any("reads texts alone: mmproj-first.gguf" in note for note in report.notes)


def test_a_tower_that_no_file_can_describe_is_said(tmp_path: Path) -> None:
    folder = write_picture_model("qwen2_5_vl", tmp_path / "model", merges=(("a", "b"),))
    options = QuantizeOptions.of_type("Q8_0")
    report = quantize_model(folder, tmp_path / "out", options)
    assert any("texts alone: a projector file cannot say" in note for note in report.notes)
    assert not find_projector(report.out)
    with pytest.raises(QuantizeError, match="--tower 8: model: the result reads texts alone"):
        quantize_model(folder, tmp_path / "other", QuantizeOptions.of_type("Q8_0", tower_bits=8))


def test_eight_bits_are_those_of_gguf(tmp_path: Path) -> None:
    """The package's own blocks, in the layers and in the projector."""
    case = TOWER_CASES["qwen3_vl"]
    case = replace(case, vision=case.vision | {"hidden_size": 64, "intermediate_size": 96})
    folder = tmp_path / "model"
    model = folder_of(case, folder)
    planned = plan_projector(open_model(folder), 8)
    assert planned is not None
    planned.write(tmp_path / "own.gguf")
    _, processor = PROCESSORS[case.kind]
    converted = write_projector(tmp_path / "converted.gguf", model, processor, q8_0)
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(converted).tensors}
    found = {one.name: one for one in gguf.GGUFReader(tmp_path / "mmproj-own.gguf").tensors}
    eight = {name for name, one in found.items() if one.tensor_type.name == "Q8_0"}
    assert eight == {name for name, one in wanted.items() if one.tensor_type.name == "Q8_0"}
    assert len(eight) > 12
    for name in eight:
        assert np.array_equal(found[name].data, wanted[name].data), name


def test_a_tower_without_layers_is_read_alone(tmp_path: Path) -> None:
    with_tower(TOWER_CASES[READ_ONLY]).save_pretrained(tmp_path)
    with pytest.raises(QuantizeError, match="gemma4_unified are read, not written"):
        plan_projector(open_model(tmp_path), 16)
