"""Every family of decoders passes calibrated quantization, including norms and biases."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models.lora import write_adapter
from support.models.makers_models import save_as_maker
from support.models.model_families import FAMILIES, random_family, write_family
from support.models.teacher_forcing import logits_of

from appliance.kernels.arrays import in_torch
from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.adapters.reader import FACTORS_NAME, INPUTS, OUTPUTS, read_adapter
from appliance.model.adapters.targets import adapter_targets
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText


def divergence(exact: torch.Tensor, found: torch.Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


@pytest.mark.parametrize("method", [Method.AWQ, Method.GPTQ])
@pytest.mark.parametrize("family", [*FAMILIES, "internlm2"])
def test_a_calibrated_model_answers_as_before(
    family: str, method: Method, model: Path, text: Path, tmp_path: Path
) -> None:
    if family == "internlm2":  # a key head's queries, its key and its value are neighbours
        base = save_as_maker(family, random_family("llama"), tmp_path / family)
    else:
        base = write_family(family, tmp_path / family)
    shutil.copyfile(model / "tokenizer.json", base / "tokenizer.json")
    rows = CalibrationText(text, num_tokens=480, row_tokens=48)
    options = QuantizeOptions(WeightScheme(8, 32, symmetric=False), method, rows)
    report = quantize_model(base, tmp_path / "out", options)
    tokens = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(9)).tolist()
    assert (report.out / FACTORS_NAME).is_file() == (method is Method.AWQ)
    before, after = open_model(base), open_model(report.out)
    targets = adapter_targets(before.spec, before.family.names)
    shapes = {name: (one.slot.shape[0], one.slot.shape[1]) for name, one in targets.items()}
    adapter = write_adapter(tmp_path / "adapter", shapes, spread=0.2)
    answers = []
    for source in (before, after):
        decoder = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
        slots = decoder.adapter_slots(targets, 1, 64)
        slots.put(0, slots.lay_out(read_adapter(adapter, source, 4)))
        for adapters in (None, slots):
            answers.append(logits_of(decoder, tokens, adapters=adapters).log_softmax(-1))
    exact, adapted, found, found_adapted = answers
    assert divergence(exact, found) < 0.02
    assert divergence(exact, adapted) > 0.1, "an adapter that says something"
    assert divergence(adapted, found_adapted) < 0.02, "though scales were folded into the model"
    factors = load_file(report.out / FACTORS_NAME) if method is Method.AWQ else {}
    for slot in before.slots():
        stored = after.weights.load(slot.name)
        assert isinstance(stored, PackedWeight) == slot.is_linear, slot.name
        module = slot.name.removesuffix(".weight")
        if module + INPUTS in factors:
            # The factors of inputs and outputs undo what was folded into a weight's row and column.
            assert isinstance(stored, PackedWeight)
            outputs = factors.get(module + OUTPUTS, torch.ones(stored.shape[0]))
            undone = stored.dequantize() * outputs[:, None] / factors[module + INPUTS]
            first = in_torch(before.weights.load(slot.name)).float()
            assert float((undone - first).norm() / first.norm()) < 0.02, slot.name
