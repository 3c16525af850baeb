"""A model becomes a folder of the trellis format, which is served packed on a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.teacher_forcing import logits_of

from appliance import LLM, SamplingParams
from appliance.config import EngineConfig
from appliance.engine.load.execution import choice
from appliance.errors import ConfigError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.spec import DecoderSpec
from appliance.progress.quantize_events import QuantizeEvent, UnitFinished
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.methods import mixed as mixed_precisions
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.walk import slopes

MakeFolder = Callable[..., Path]
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "head_dim": 64,
    "num_key_value_heads": 1,
}  # fmt: skip
TOKENS = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture
def base(make_llama: MakeFolder, model: Path) -> Path:
    folder = make_llama("base", **SIZES)
    shutil.copyfile(model / "tokenizer.json", folder / "tokenizer.json")
    (folder / "chat_template.jinja").unlink()
    return folder


def options(text: Path, bits: int, **others: Any) -> QuantizeOptions:
    rows = CalibrationText(text, num_tokens=480, row_tokens=48)
    scheme, form = TrellisScheme(bits), WeightFormat.TRELLIS
    return QuantizeOptions(scheme, Method.TRELLIS, rows, format=form, **others)


@pytest.mark.parametrize("bits", [3, 5])
def test_a_folder_is_written_read_and_served(
    base: Path, text: Path, tmp_path: Path, bits: int
) -> None:
    out = quantize_model(base, tmp_path / "out", options(text, bits)).out
    source = open_model(out)
    assert source.is_trellis
    for slot in source.slots():
        weight = source.weights.load(slot.name)
        assert isinstance(weight, TrellisWeight) == slot.is_linear, slot.name
    logits = []
    for path in (base, out):
        decoder = load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)
        logits.append(logits_of(decoder, TOKENS).log_softmax(-1))
    exact, coded = logits
    divergence = float((exact.exp() * (exact - coded)).sum(-1).mean())
    assert divergence < 8 * 4.0**-bits
    served = LLM(str(out), device="cpu", max_model_len=48, threads=1, speculate="off")
    wanted = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    lengths = (1, 5, 17, 40)
    answers = served.generate([TOKENS[:length] for length in lengths], wanted, progress=False)
    for length, answer in zip(lengths, answers, strict=True):
        (token,), expected = answer.outputs[0].token_ids, coded[length - 1]
        assert answer.outputs[0].cumulative_logprob == pytest.approx(
            float(expected[token]), abs=0.05
        )
        assert float(expected.max() - expected[token]) < 0.1  # both off by half of it


def test_ends_of_the_format_are_read_and_served(base: Path, text: Path, tmp_path: Path) -> None:
    out = quantize_model(base, tmp_path / "out", options(text, 4, head=5, embedding=5)).out
    weights = open_model(out).weights
    assert [weights.packed_bits(f"{end}.weight") for end in ("lm_head", "model.embed_tokens")] == [
        5,
        5,
    ]
    decoder = load_decoder(open_model(out), REFERENCE, torch.device("cpu"), torch.float32)
    expected = logits_of(decoder, TOKENS).log_softmax(-1)[-1]
    served = LLM(str(out), device="cpu", max_model_len=48, threads=1, speculate="off")
    wanted = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    (answer,) = served.generate([TOKENS], wanted, progress=False)
    (token,) = answer.outputs[0].token_ids
    assert answer.outputs[0].cumulative_logprob == pytest.approx(float(expected[token]), abs=0.05)


def test_a_run_is_the_same_again(base: Path, text: Path, tmp_path: Path) -> None:
    whole = quantize_model(base, tmp_path / "whole", options(text, 4)).out
    again = quantize_model(base, tmp_path / "again", options(text, 4)).out
    name = "model.safetensors"
    assert (whole / name).read_bytes() == (again / name).read_bytes()
    assert json.loads((whole / "config.json").read_text())["quantization_config"]["version"] == 1


@pytest.mark.parametrize("mixed", [None, 3.5])
def test_a_run_that_ended_goes_on_to_the_same_bytes(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: float | None
) -> None:
    whole = quantize_model(base, tmp_path / "whole", options(text, 4, mixed=mixed)).out

    def stop(event: QuantizeEvent) -> None:
        if isinstance(event, UnitFinished):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(base, tmp_path / "out", options(text, 4, mixed=mixed), stop)
    # What was found before the first layer is kept, not found again.
    monkeypatch.setattr(slopes, "Slopes", None)
    monkeypatch.setattr(mixed_precisions, "mixed_schemes", None)
    out = quantize_model(base, tmp_path / "out", options(text, 4, mixed=mixed)).out
    assert (whole / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_mixed_bits_keep_to_their_budget_and_parts_differ(
    base: Path, text: Path, tmp_path: Path
) -> None:
    report = quantize_model(base, tmp_path / "out", options(text, 4, mixed=3.5))
    weights = open_model(report.out).weights
    names = [
        slot.name for slot in open_model(base).slots() if slot.is_linear and slot.layer is not None
    ]
    bits = {name: weights.packed_bits(name) for name in names}
    assert len(set(bits.values())) > 1
    assert 3.2 < report.quantized_bits_per_weight <= 3.5
    served = LLM(str(report.out), device="cpu", max_model_len=48, threads=1, speculate="off")
    decoder = load_decoder(open_model(report.out), REFERENCE, torch.device("cpu"), torch.float32)
    expected = logits_of(decoder, TOKENS).log_softmax(-1)[-1]
    wanted = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    (answer,) = served.generate([TOKENS], wanted, progress=False)
    (token,) = answer.outputs[0].token_ids
    assert answer.outputs[0].cumulative_logprob == pytest.approx(float(expected[token]), abs=0.05)


@pytest.mark.parametrize("experts", [False, True])
def test_a_gpu_executes_all_but_experts(
    base: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, experts: bool
) -> None:
    monkeypatch.setattr(choice, "choose_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    monkeypatch.setattr(DecoderSpec, "has_experts", experts)
    source = open_model(quantize_model(base, tmp_path / "out", options(text, 2)).out)
    if not experts:
        precision, notes = choice.choose_precision(EngineConfig(device="cuda"), source)
        assert precision.device.type == "cuda"
        assert not any("trellis" in note for note in notes)
        return
    with pytest.raises(ConfigError, match="take --device cpu"):
        choice.choose_precision(EngineConfig(device="cuda"), source)
    precision, notes = choice.choose_precision(EngineConfig(), source)
    assert precision.device.type == "cpu"
    assert any("experts of the trellis format on a GPU" in note for note in notes)
