"""The default model, quantized: read back by us, by transformers, and made in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from teacher_forcing import logits_of

from appliance.kernels.backend import select_backend
from appliance.kernels.packed import PackedWeight
from appliance.kernels.weight import dense as dense_of
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.rtn import quantize
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.run.report import QuantizeReport
from appliance.tokenizer import Tokenizer

pytestmark = pytest.mark.model

SCHEME = WeightScheme(4, 64)
TEXT = "Hello  world!\n\n  def f(x):\n\treturn 1234567  # caf\u00e9 \u4f60\u597d <|im_end|>"
CHAT = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def report(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> QuantizeReport:
    return quantize_model(
        smollm2_gguf, tmp_path_factory.mktemp("quantized") / "out", QuantizeOptions(SCHEME)
    )


def test_the_report_says_what_was_made(report: QuantizeReport) -> None:
    assert report.num_quantized == 210
    assert report.quantized_bits_per_weight == pytest.approx(4.25, abs=0.01)
    files = sum(path.stat().st_size for path in report.out.glob("*.safetensors"))
    assert files == pytest.approx(report.weight_bytes, rel=0.01)
    assert any(note.startswith("re-quantized from Q4_1") for note in report.notes)
    (larger,) = (note for note in report.notes if note.startswith("the result is larger"))
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in larger


def test_every_weight_is_the_source_rounded(report: QuantizeReport, smollm2_gguf: Path) -> None:
    source, result = open_model(smollm2_gguf), open_model(report.out)
    assert result.spec == source.spec
    for slot in source.slots():
        before, after = source.weights.load(slot.name), result.weights.load(slot.name)
        dense = dense_of(before, torch.float32)
        if slot.is_linear:
            assert isinstance(after, PackedWeight)
            expected = quantize(dense, SCHEME)
            assert torch.equal(after.codes, expected.codes)
            assert torch.equal(after.scale, expected.scale)
        else:
            assert isinstance(after, torch.Tensor)
            assert torch.equal(after, dense.bfloat16())


def test_transformers_computes_the_same_logits(report: QuantizeReport) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(report.out, dtype=torch.float32)
    device = torch.device("cpu")
    backend = select_backend(device, "reference")
    ours = load_decoder(open_model(report.out), backend, device, torch.float32)
    token_ids = Tokenizer.from_path(report.out).encode_chat(CHAT)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
        found = logits_of(ours, token_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_the_tokenizer_survives(report: QuantizeReport, smollm2_gguf: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(report.out)
    before, after = Tokenizer.from_path(smollm2_gguf), Tokenizer.from_path(report.out)
    expected = before.encode(TEXT, add_special_tokens=True)
    assert after.encode(TEXT, add_special_tokens=True) == expected
    assert theirs(TEXT)["input_ids"] == expected
    assert after.eos_token_ids == before.eos_token_ids
    assert after.bos_token_id == before.bos_token_id
    assert after.encode_chat(CHAT) == before.encode_chat(CHAT)
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=True)
    assert rendered["input_ids"] == before.encode_chat(CHAT)


def test_a_fraction_of_the_model_is_in_memory_at_once(smollm2_gguf: Path, tmp_path: Path) -> None:
    code = f"""
import re
from pathlib import Path
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.tokenizer import Tokenizer

def peak_kib():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

Tokenizer.from_path(Path({str(smollm2_gguf)!r}))
before = peak_kib()
quantize_model(Path({str(smollm2_gguf)!r}), Path({str(tmp_path / "out")!r}))
print(peak_kib() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    # One decoder layer in float32 has 13.5 MiB and the embedding, the largest tensor, 57 MiB in
    # 16 bits (28 as it is read); the whole model would have 257 MiB in 16 bits.
    assert int(result.stdout) / 1024 < 110
