"""A quantized model that reads pictures reads them as before: its tower is copied."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from support.models.picture_models import write_picture_model

from appliance.media.processor_config import read_image_processor
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.facts import stored_size
from appliance.quant.repack import repack_model
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import dry_run, quantize_model

if TYPE_CHECKING:
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
