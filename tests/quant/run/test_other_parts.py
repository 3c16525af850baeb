"""A quantized model that reads pictures reads them as before, or with a tower of 8 bits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.models.picture_models import write_picture_model
from support.models.towers import TOWER_CASES
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

from appliance.errors import ConfigError, QuantizeError
from appliance.kernels.weights.weight import dense
from appliance.media.processor_config import read_image_processor
from appliance.model.source import open_model
from appliance.model.vision.families.family import EMBEDDING, NO_NORM
from appliance.model.vision.positions import patch_places
from appliance.model.vision.source import open_tower
from appliance.model.vision.torch_tower import load_torch_tower
from appliance.model.vision.tower import PatchGrid
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.facts import stored_size
from appliance.quant.repack import repack_model
from appliance.quant.run.options import Method, QuantizeOptions, ResultReader, WeightFormat
from appliance.quant.run.pipeline import dry_run, quantize_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPTIONS = QuantizeOptions(WeightScheme(8, 32), Method.RTN)
NOTE = "tensors of other parts, such as vision, are kept"


@pytest.fixture(scope="module", params=["qwen3_vl", "internvl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_picture_model(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def out(folder: Path) -> Path:
    out = folder.parent / "out"
    report = quantize_model(folder, out, OPTIONS)
    assert any(NOTE in note for note in report.notes)
    return out


def of_text(name: str) -> bool:
    return any(part in name for part in ("language_model.", "text_model.", "lm_head."))


def test_other_parts_are_copied_and_described(folder: Path, out: Path) -> None:
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    others = {name for name in before if not of_text(name)}
    assert others
    assert {name for name in after if not of_text(name)} == others
    for name in others:
        rounded = before[name].to(torch.bfloat16) if before[name].ndim > 1 else before[name]
        assert torch.equal(after[name], rounded), name
    was, now = (json.loads((path / "config.json").read_text()) for path in (folder, out))
    assert now["architectures"] == was["architectures"]
    assert now["vision_config"] == was["vision_config"]
    ignored = set(now["quantization_config"]["ignore"])
    linears = {name.removesuffix(".weight") for name in others if before[name].ndim == 2}
    assert linears <= ignored
    assert read_image_processor(out) == read_image_processor(folder)
    assert stored_size(open_model(out)).stored_bytes < sum(t.nbytes for t in after.values())
    counted = {one.tensors: one for one in dry_run(folder, out.parent / "dry", OPTIONS).classes}
    assert counted["other parts"].count == len(others)


def test_they_are_repacked(out: Path, tmp_path: Path) -> None:
    """To 16 bits, which other programs read without a word about quantization."""
    repack_model(out, tmp_path / "dense", None)
    before, after = (load_file(path / "model.safetensors") for path in (out, tmp_path / "dense"))
    others = {name for name in before if not of_text(name)}
    assert others == {name for name in after if not of_text(name)}
    assert all(torch.equal(after[name], before[name]) for name in others)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "vision_config" in config


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
# InternVL's that are scaled once more are unpacked as they are read.
@pytest.mark.parametrize(("kind", "linears", "held"), [("qwen3_vl", 16, 16), ("internvl", 18, 12)])
def test_a_tower_of_eight_bits_is_the_one_that_transformers_reads(
    kind: str, linears: int, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = TOWER_CASES[kind]
    wide = case.vision | {"hidden_size": 64, "intermediate_size": 96}
    monkeypatch.setitem(TOWER_CASES, kind, replace(case, vision=wide))
    folder = write_picture_model(kind, tmp_path / "model")
    report = quantize_model(folder, tmp_path / "out", replace(OPTIONS, tower_bits=8))
    assert f"{linears} weights of the tower have 8 bits" in report.notes
    unpacked = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForImageTextToText.from_pretrained(
        report.out, dtype=torch.float32, quantization_config=unpacked
    ).eval()
    rows, columns = case.grids[0]
    size = model.config.vision_config.patch_size
    size = size if isinstance(size, int) else size[0]
    patches = np.random.default_rng(3).normal(size=(rows, columns, 3, size, size))
    made = case.pixels([patches.astype(np.float32)])
    wanted = model.model.get_image_features(**made).pooler_output
    wanted = torch.cat([*wanted]).reshape(-1, model.config.get_text_config().hidden_size)
    source = open_tower(report.out)
    assert source is not None
    packed = [source.weights.packed_bits(name) for name in source.weights.tensor_names()]
    assert packed.count(8) == held
    places = patch_places(rows, columns, source.spec.merge)
    ordered = patches.astype(np.float32)[places[0], places[1]].reshape(rows * columns, -1)
    tower = load_torch_tower(source, torch.device("cpu"), torch.float32)
    found = tower([PatchGrid(ordered, rows, columns)])[0].embeddings
    theirs = model.state_dict()
    for name in source.weights.tensor_names():
        if not name.startswith((EMBEDDING, NO_NORM, "tower.layernorm.")):
            own = dense(source.weights.as_stored(name), "float32")
            packing = "float32" if isinstance(own, torch.Tensor) and own.ndim != 2 else "bfloat16"
            stored = source.weights.stored_name(name)
            weight = theirs["model." + stored.removeprefix("model.")]
            # transformers' package unpacks into the type of the scales
            assert torch.equal(own.to(getattr(torch, packing)).float(), weight), name
    assert np.corrcoef(np.asarray(found).ravel(), wanted.detach().ravel())[0, 1] > 0.9999
    whole = open_tower(folder)
    assert whole is not None
    before = load_torch_tower(whole, torch.device("cpu"), torch.float32)
    exact = np.asarray(before([PatchGrid(ordered, rows, columns)])[0].embeddings)
    assert np.corrcoef(exact.ravel(), np.asarray(found).ravel())[0, 1] > 0.998
    repack_model(report.out, tmp_path / "dense", None)
    again = open_tower(tmp_path / "dense")
    assert again is not None
    repacked = load_torch_tower(again, torch.device("cpu"), torch.float32)
    kept = np.asarray(repacked([PatchGrid(ordered, rows, columns)])[0].embeddings)
    assert np.allclose(kept, np.asarray(found), atol=0.1)


@pytest.mark.parametrize("format", [WeightFormat.AWQ, WeightFormat.GPTQ, WeightFormat.TRELLIS])
def test_formats_of_one_kind_of_weight_hold_no_tower_of_eight_bits(format: WeightFormat) -> None:
    with pytest.raises(ConfigError, match=f"--format {format.value} holds no tower of 8 bits"):
        QuantizeOptions(format=format, tower_bits=8)
    with pytest.raises(ConfigError, match="transformers does not load towers of 8 bits of all"):
        QuantizeOptions(reader=ResultReader.TRANSFORMERS, tower_bits=8)
    with pytest.raises(ConfigError, match="--tower 4 is not 8 or 16"):
        QuantizeOptions(tower_bits=4)


def test_a_model_without_a_tower_has_none_of_eight_bits(
    make_llama: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(QuantizeError, match="has no vision tower; leave it out"):
        quantize_model(make_llama("plain"), tmp_path / "out", replace(OPTIONS, tower_bits=8))
