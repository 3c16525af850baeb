"""Calibration rows, and the results of calibrated methods on a whole small model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.teacher_forcing import logits_of

from appliance.errors import QuantizeError
from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import awq
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import Calibration, CalibrationText
from appliance.quant.text.documents import default_documents
from appliance.quant.walk.walk import Walk

MakeFolder = Callable[..., Path]
CPU = torch.device("cpu")
# share of rounding's loss; random weights leave AWQ little to gain
BOUNDS = {"awq": 0.95, "gptq": 0.8, "awq+gptq": 0.8}
SCHEME = WeightScheme(4, 32, False)


def options(text: Path, seed: int = 0) -> CalibrationText:
    return CalibrationText(text, num_tokens=960, row_tokens=48, seed=seed)


def kl_divergence(source: Path, result: Path) -> float:
    token_ids = torch.randint(0, 50, (60,), generator=torch.Generator().manual_seed(9)).tolist()
    base, found = (
        logits_of(
            load_decoder(open_model(path), REFERENCE, CPU, torch.float32), token_ids
        ).log_softmax(-1)
        for path in (source, result)
    )
    return float((base.exp() * (base - found)).sum(-1).mean())


def test_rows_begin_documents_and_a_seed_orders_them(
    model: Path, text: Path, alphabet: str
) -> None:
    rows = options(text).rows_of(model)
    assert rows.rows.shape == (20, 48)
    assert rows.dropped == 1
    assert "text" in str(rows)
    assert "1 documents too short" in str(rows)
    again, other = options(text).rows_of(model), options(text, seed=1).rows_of(model)
    assert torch.equal(rows.rows, again.rows)
    assert rows.fingerprint == again.fingerprint != other.fingerprint
    document = [alphabet.index(letter) for letter in (text / "a.txt").read_text()]
    starts = [document[i * 48 : (i + 1) * 48] for i in range(18)]
    assert sum(row in starts for row in rows.rows.tolist()) > 0


def test_the_default_text_leaves_half_for_evaluation() -> None:
    used, kept = (
        {name for name, _ in default_documents(held_out=held_out)} for held_out in (False, True)
    )
    assert not used & kept
    assert min(len(used), len(kept)) > 30


def test_too_little_text_is_refused_with_what_there_is(model: Path, text: Path) -> None:
    with pytest.raises(QuantizeError, match=r"makes 54 rows of 48 tokens, but 84 are needed"):
        CalibrationText(text, num_tokens=4000, row_tokens=48).rows_of(model)
    (text / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(QuantizeError, match="cannot read calibration text"):
        options(text).rows_of(model)
    (text / "empty").mkdir()
    with pytest.raises(QuantizeError, match="holds no"):
        options(text / "empty").rows_of(model)


def test_scales_are_folded_without_a_trace(model: Path, text: Path, tmp_path: Path) -> None:
    source = open_model(model)
    walk = Walk(source, options(text).rows_of(model).rows, tmp_path / "stream", CPU)
    block = walk.block(0)
    before = [walk.run(block, rows) for rows in walk.portions()]
    seen = walk.observe(block, list(block.linears()))
    chosen = awq.scale_inputs(block, seen, [SCHEME] * 4, torch.bfloat16, 0.0)
    assert any(scales.exponent > 0 for scales in chosen)
    after = [walk.run(block, rows) for rows in walk.portions()]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    norm = block.mixer_norm.weight
    assert torch.equal(norm, norm.bfloat16().float()), "as it will be stored"


@pytest.mark.parametrize("method", BOUNDS)
def test_calibrated_methods_lose_less_than_rounding(
    model: Path, text: Path, tmp_path: Path, method: str
) -> None:
    rounded = quantize_model(model, tmp_path / "rtn", QuantizeOptions(SCHEME)).out
    report = quantize_model(
        model, tmp_path / "out", QuantizeOptions(SCHEME, Method(method), options(text))
    )
    assert report.method == method
    assert any(note.startswith("calibrated with 20 rows") for note in report.notes)
    assert kl_divergence(model, report.out) < BOUNDS[method] * kl_divergence(model, rounded)
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


def test_the_same_seed_gives_the_same_bytes(model: Path, text: Path, tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / name
        quantize_model(model, out, QuantizeOptions(SCHEME, Method.AWQ_GPTQ, options(text, seed)))
        digests.append(hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_activations_that_overflow_are_named(
    make_llama: MakeFolder, model: Path, text: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    large = make_llama("large", tensors={name: torch.full((128, 96), 3e38, dtype=torch.bfloat16)})
    (large / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (large / "chat_template.jinja").unlink()
    with pytest.raises(QuantizeError, match=r"before model\.layers\.0\.mlp\.down_proj"):
        quantize_model(large, tmp_path / "out", QuantizeOptions(SCHEME, Method.GPTQ, options(text)))
    assert not (tmp_path / "out").exists()


def test_calibration_says_what_it_was(model: Path) -> None:
    rows = Calibration(torch.zeros((2, 8), dtype=torch.int64), "a book", "00", 0)
    assert str(rows) == "calibrated with 2 rows of 8 tokens of a book"
