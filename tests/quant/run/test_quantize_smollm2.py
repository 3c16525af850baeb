"""The quantized default model: we and transformers read it, and making it took little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.teacher_forcing import logits_of

from appliance.kernels.backend import select_backend
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense as dense_of
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.rtn import quantize
from appliance.tokenizer import Tokenizer

pytestmark = pytest.mark.model

SCHEME = WeightScheme(4, 64)
TEXT = "Hello  world!\n\n  def f(x):\n\treturn 1234567  # caf\u00e9 \u4f60\u597d <|im_end|>"
CHAT = [{"role": "user", "content": "What is the capital of Japan?"}]
RUN = """
import json, re, sys
from pathlib import Path
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.run.options import QuantizeOptions
from appliance.tokenizer import Tokenizer

def peak_kib():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

model, out = map(Path, sys.argv[1:])
Tokenizer.from_path(model)
before = peak_kib()
report = quantize_model(model, out, QuantizeOptions(WeightScheme(4, 64)))
print(json.dumps({
    "num_quantized": report.num_quantized, "bits": report.quantized_bits_per_weight,
    "weight_bytes": report.weight_bytes, "notes": report.notes, "kib": peak_kib() - before,
}))
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized") / "out"


@pytest.fixture(scope="module")
def report(smollm2_gguf: Path, out: Path) -> dict[str, Any]:
    """The report of a run in a process of its own, and the KiB that it took."""
    command = [sys.executable, "-c", RUN, str(smollm2_gguf), str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(printed)
    return found


def test_the_report_says_what_was_made(report: dict[str, Any], out: Path) -> None:
    assert report["num_quantized"] == 210
    assert report["bits"] == pytest.approx(4.25, abs=0.01)
    files = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert files == pytest.approx(report["weight_bytes"], rel=0.01)
    assert any(note.startswith("re-quantized from Q4_1") for note in report["notes"])
    (larger,) = (note for note in report["notes"] if note.startswith("the result is larger"))
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in larger


@pytest.mark.usefixtures("report")
def test_every_weight_is_the_source_rounded(out: Path, smollm2_gguf: Path) -> None:
    source, result = open_model(smollm2_gguf), open_model(out)
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


@pytest.mark.usefixtures("report")
def test_transformers_computes_the_same_logits(out: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    device = torch.device("cpu")
    backend = select_backend(device, "reference")
    ours = load_decoder(open_model(out), backend, device, torch.float32)
    token_ids = Tokenizer.from_path(out).encode_chat(CHAT)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
        found = logits_of(ours, token_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("report")
def test_the_tokenizer_survives(out: Path, smollm2_gguf: Path) -> None:
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(out)
    before, after = Tokenizer.from_path(smollm2_gguf), Tokenizer.from_path(out)
    expected = before.encode(TEXT, add_special_tokens=True)
    assert after.encode(TEXT, add_special_tokens=True) == expected
    assert theirs(TEXT)["input_ids"] == expected
    assert after.eos_token_ids == before.eos_token_ids
    assert after.bos_token_id == before.bos_token_id
    assert after.encode_chat(CHAT) == before.encode_chat(CHAT)
    rendered = theirs.apply_chat_template(CHAT, add_generation_prompt=True)
    assert rendered["input_ids"] == before.encode_chat(CHAT)


def test_a_fraction_of_the_model_is_in_memory_at_once(report: dict[str, Any]) -> None:
    # One decoder layer in float32 has 13.5 MiB and the embedding, the largest tensor, 57 MiB in
    # 16 bits (28 as it is read); the whole model would have 257 MiB in 16 bits.
    assert report["kib"] / 1024 < 110
