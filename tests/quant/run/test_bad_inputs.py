"""Models that no method can improve: every method says so in one line, and nothing breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.errors import ApplianceError, QuantizeError
from appliance.kernels.weights.weight import dense
from appliance.model.source import open_model
from appliance.quant.formats.scheme import Fp4Scheme, TrellisScheme, WeightScheme
from appliance.quant.methods import data_free
from appliance.quant.run.options import FP4_METHODS, Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText

MakeFolder = Callable[..., Path]
MakeModel = Callable[..., Path]
SCHEME = WeightScheme(4, 32, False)
WIDTH = 128
CALIBRATED = [method for method in Method if method.needs_text]
NORM = "model.layers.1.post_attention_layernorm.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def make_model(make_llama: MakeFolder, model: Path) -> MakeModel:
    """The readable tiny Llama with some other tensors."""

    def make(**tensors: torch.Tensor) -> Path:
        folder = make_llama("bad", hidden_size=WIDTH, tensors=tensors)
        (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
        (folder / "chat_template.jinja").unlink()
        return folder

    return make


def options(text: Path, method: Method) -> QuantizeOptions:
    rows = CalibrationText(text, num_tokens=480, row_tokens=48)
    if method is Method.TRELLIS:
        return QuantizeOptions(TrellisScheme(4), method, rows, format=WeightFormat.TRELLIS)
    if method in FP4_METHODS:
        return QuantizeOptions(Fp4Scheme(has_powers=method is Method.MXFP4), method, rows)
    return QuantizeOptions(SCHEME, method, rows)


@pytest.mark.parametrize("method", CALIBRATED)
def test_a_layer_that_sees_nothing_but_zeros_is_rounded_and_said(
    make_model: MakeModel, text: Path, tmp_path: Path, method: Method
) -> None:
    silent = make_model(**{NORM: torch.zeros(WIDTH, dtype=torch.bfloat16)})
    report = quantize_model(silent, tmp_path / "out", options(text, method))
    names = f"{GATE} + {GATE.replace('gate', 'up')}"
    expected = f"{WIDTH} of {WIDTH} inputs of {names} were 0 in all calibration text"
    assert any(note.startswith(expected) for note in report.notes)
    found, source = open_model(report.out).weights.load(GATE), open_model(silent).weights.load(GATE)
    assert isinstance(source, torch.Tensor)
    lost = float((dense(found, torch.float32) - source).square().mean())
    if method is Method.TRELLIS:  # an error as of a normal source
        assert lost < 1.6 * 4.0**-4 * float(source.float().square().mean())
        return
    scheme = options(text, method).scheme
    rounded = data_free.quantize_linear(source.float(), None, scheme, torch.bfloat16)
    assert lost <= float((dense(rounded, torch.float32) - source).square().mean()) * 1.001


@pytest.mark.parametrize("method", CALIBRATED)
def test_inputs_that_are_always_zero_are_counted(
    make_model: MakeModel, text: Path, tmp_path: Path, method: Method
) -> None:
    norm = torch.ones(WIDTH, dtype=torch.bfloat16)
    norm[5:8] = 0
    report = quantize_model(make_model(**{NORM: norm}), tmp_path / "out", options(text, method))
    assert any(note.startswith(f"3 of {WIDTH} inputs of") for note in report.notes)
    for slot in open_model(report.out).slots():
        loaded = open_model(report.out).weights.load(slot.name)
        assert torch.isfinite(dense(loaded, torch.float32)).all()


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("name", [GATE, NORM, "model.embed_tokens.weight"])
def test_a_weight_that_is_not_finite_is_named_by_every_method(
    make_model: MakeModel, text: Path, tmp_path: Path, method: Method, name: str
) -> None:
    shapes = {GATE: (128, WIDTH), NORM: (WIDTH,), "model.embed_tokens.weight": (50, WIDTH)}
    weight = torch.ones(shapes[name], dtype=torch.bfloat16)
    weight.view(-1)[::7] = torch.nan
    broken = make_model(**{name: weight})
    with pytest.raises(ApplianceError, match=name) as caught:
        quantize_model(broken, tmp_path / "out", options(text, method))
    assert "NaN or infinity" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("method", CALIBRATED)
def test_activations_that_overflow_are_named_by_every_method(
    make_model: MakeModel, text: Path, tmp_path: Path, method: Method
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    loud = make_model(**{name: torch.full((128, WIDTH), 3e38, dtype=torch.bfloat16)})
    with pytest.raises(QuantizeError, match=r"before model\.layers\.0\.mlp\.down_proj"):
        quantize_model(loud, tmp_path / "out", options(text, method))
    assert not list(tmp_path.glob(".*"))
