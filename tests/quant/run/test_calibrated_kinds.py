"""Calibrated methods on layers of every kind: experts, states, latents, gates, shared ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.causal_models import random_model
from support.models.centered_models import CENTERED
from support.models.expert_models import EXPERTS
from support.models.recurrent_models import RECURRENT, logits_in_steps

from appliance.errors import QuantizeError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

SIZES = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
TOKENS = torch.randint(0, 50, (45,), generator=torch.Generator().manual_seed(9)).tolist()
KINDS = EXPERTS | RECURRENT | CENTERED
_UNKNOWN = {("falcon", "head_dim")}
LONELY = 3  # no token chooses this expert


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write(name: str, tokenizer: Path, folder: Path) -> Path:
    model_type, settings = KINDS[name]
    widths = {"moe_intermediate_size": 32} if "moe_intermediate_size" in settings else {}
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if (model_type, key) not in _UNKNOWN}
    model: Any = random_model(model_type, **sizes | settings | widths)
    with torch.no_grad():
        for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith("correction_bias"):
                parameter.copy_(torch.randn(parameter.shape) * 0.01)
                parameter[LONELY] = -100
            elif parameter.dim() > 1 and "inv_freq" not in key:
                parameter.mul_(5)
    model.to(torch.bfloat16).save_pretrained(folder)
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    return folder


def logits(path: Path) -> Tensor:
    decoder = load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)
    return logits_in_steps(decoder, TOKENS, [45]).log_softmax(-1)


def divergence(exact: Tensor, found: Tensor) -> float:
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def options(method: Method, bits: int, text: Path) -> QuantizeOptions:
    rows = CalibrationText(text, num_tokens=480, row_tokens=48)
    return QuantizeOptions(WeightScheme(bits, 32, symmetric=False), method, rows)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("glm4_moe", Method.GPTQ),
        ("glm4_moe", Method.AWQ),
        ("gemma4", Method.GPTQ),
        ("gpt_oss", Method.GPTQ),
        ("deepseek_v3", Method.GPTQ),
        ("lfm2", Method.AWQ),
        ("qwen3_next", Method.AWQ_GPTQ),
        ("nemotron_h", Method.GPTQ),
        ("nemotron_h-latent", Method.GPTQ),
        ("falcon-new", Method.GPTQ),
    ],
)
def test_a_calibrated_model_answers_as_before(
    name: str, method: Method, model: Path, text: Path, tmp_path: Path
) -> None:
    base = write(name, model, tmp_path / "base")
    report = quantize_model(base, tmp_path / "out", options(method, 8, text))
    # An untrained Gemma 4 does not scale its scores.
    bound = 0.05 if name == "gemma4" else 0.02
    assert divergence(logits(base), logits(report.out)) < bound
    before, after = open_model(base), open_model(report.out)
    for slot in before.slots():
        stored = after.weights.load(slot.name)
        fits = slot.is_linear and slot.shape[1] % 32 == 0
        assert isinstance(stored, PackedWeight) == fits, slot.name
        if not slot.is_linear and method is Method.GPTQ:
            loaded = before.weights.load(slot.name)
            assert isinstance(loaded, torch.Tensor)
            assert isinstance(stored, torch.Tensor)
            assert torch.equal(loaded.float(), stored.float()), slot.name
    unseen = [note for note in report.notes if "no calibration text came to" in note]
    if "correction_bias" in " ".join(slot.name for slot in before.slots()):
        assert unseen, "one expert at least"
        assert all(str(LONELY) in note for note in unseen)


def test_what_text_tells_is_worth_bits(model: Path, text: Path, tmp_path: Path) -> None:
    """The comparison uses the calibration text itself."""
    base = write("qwen3_moe", model, tmp_path / "base")
    exact = logits(base)
    out = {}
    for method in (Method.RTN, Method.GPTQ):
        out[method] = tmp_path / method.value
        quantize_model(base, out[method], options(method, 4, text))
    lost = {method: divergence(exact, logits(path)) for method, path in out.items()}
    assert lost[Method.GPTQ] < 0.8 * lost[Method.RTN], lost


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("glm4_moe", {"mixed": 5.0}, "has experts, which --mixed does not"),
        ("lfm2", {"mixed": 5.0}, "has recurrent layers, which --mixed does not"),
        ("lfm2", {"kv_bits": 6.0}, "has recurrent layers, which --kv-bits does not"),
        ("deepseek_v3", {"kv_bits": 6.0}, "has latent attention, which --kv-bits does not"),
    ],
)
def test_what_reads_text_and_covers_no_such_layer_is_refused(
    name: str, asked: dict[str, Any], said: str, model: Path, text: Path, tmp_path: Path
) -> None:
    base = write(name, model, tmp_path / "base")
    choice = replace(options(Method.RTN, 4, text), **asked)
    with pytest.raises(QuantizeError, match=said):
        quantize_model(base, tmp_path / "out", choice)
    assert not (tmp_path / "out").exists()
