"""Every family of decoders goes all the way through calibrated quantizing, norms and biases too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from model_families import FAMILIES, write_family

from appliance.kernels.backend import REFERENCE
from appliance.kernels.packed import PackedWeight
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.teacher import logits_of
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText


@pytest.mark.parametrize("method", [Method.AWQ, Method.GPTQ])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_calibrated_model_answers_as_before(
    family: str, method: Method, model: Path, text: Path, tmp_path: Path
) -> None:
    base = write_family(family, tmp_path / family)
    shutil.copyfile(model / "tokenizer.json", base / "tokenizer.json")
    rows = CalibrationText(text, num_tokens=480, row_tokens=48)
    options = QuantizeOptions(WeightScheme(8, 32, symmetric=False), method, rows)
    report = quantize_model(base, tmp_path / "out", options)
    tokens = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(9)).tolist()
    exact, found = (
        logits_of(
            load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32), tokens
        ).log_softmax(-1)
        for path in (base, report.out)
    )
    assert float((exact.exp() * (exact - found)).sum(-1).mean()) < 0.02
    before, after = open_model(base), open_model(report.out)
    for slot in before.slots():
        stored = after.weights.load(slot.name)
        assert isinstance(stored, PackedWeight) == slot.is_linear, slot.name
