"""`quantize` and `repack` copy a checkpoint's draft head unchanged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.draft_answers import load, requests_of, run
from support.engine.drafting import draft_always
from support.models.draft_heads import FAMILIES, write_with_head

from appliance.kernels.weights.weight import dense
from appliance.model.draft_head import HeadSource, find_head
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.repack import repack_model
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import dry_run, quantize_model

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = QuantizeOptions(WeightScheme(8, 32), Method.RTN)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp(request.param)
    write_with_head(request.param, path)
    return path


def head_of(folder: Path) -> HeadSource:
    head = find_head(open_model(folder), in_torch=True)
    assert head is not None
    return head


def assert_same_head(before: HeadSource, after: HeadSource) -> None:
    for slot in before.slots():
        old, new = before.source.weights.load(slot.name), after.source.weights.load(slot.name)
        assert isinstance(new, torch.Tensor), slot.name
        expected = dense(old, torch.float32)
        if new.dtype != torch.float32:
            expected = expected.to(new.dtype).float()
        assert torch.equal(new.float(), expected), slot.name


def test_it_keeps_16_bits_and_drafts(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    classes = {one.tensors: one for one in dry_run(folder, out, OPTIONS).classes}
    head = head_of(folder)
    assert classes["head that drafts"].count == len(head.slots())
    report = quantize_model(folder, out, OPTIONS)
    assert "the head that drafts keeps 16 bits, for --speculate mtp" in report.notes
    assert_same_head(head, head_of(out))
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert head.join.linear in ignored
    matrices = [slot for slot in head.slots() if len(slot.shape) == 2]
    assert {slot.name.removesuffix(".weight") for slot in matrices} <= set(ignored)

    requests = [one for one in requests_of(512) if one.request_id != "beams"]
    expected, pieces = run(load(out), requests)
    engine = load(out, speculate="mtp")
    draft_always(engine)
    found, fewer = run(engine, requests)
    assert found == expected
    assert engine.stats().accepted_tokens_total > 50
    assert fewer < pieces


def test_it_is_repacked(tmp_path: Path) -> None:
    first, out, again = (tmp_path / name for name in ("first", "out", "again"))
    write_with_head("qwen3_5", first)
    quantize_model(first, out, QuantizeOptions(WeightScheme(4, 32), Method.RTN))
    repacked = repack_model(out, again, WeightFormat.AWQ)
    assert "the head that drafts keeps 16 bits, for --speculate mtp" in repacked.notes
    assert_same_head(head_of(out), head_of(again))


def test_a_head_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    write_with_head("glm4_moe", folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.3.shared_head.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    report = quantize_model(folder, out, OPTIONS)
    (note,) = [one for one in report.notes if one.startswith("the head that drafts is left out: ")]
    assert "model.layers.3.shared_head.norm.weight is missing" in note
    assert find_head(open_model(out)) is None
