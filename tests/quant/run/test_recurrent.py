"""Models with recurrent layers through `quantize`: linears are rounded, gates are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.recurrent_models import RECURRENT, SIZES, logits_in_steps
from transformers import AutoConfig, AutoModelForCausalLM

from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import rtn
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model

if TYPE_CHECKING:
    from pathlib import Path

SCHEME = WeightScheme(4, 32)
OTHERS: dict[str, Any] = {
    "vocab_size": 60,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = RECURRENT[request.param]
    config = AutoConfig.for_model(model_type, **SIZES | settings | OTHERS)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


def test_linears_are_rounded_and_what_decides_is_not(folder: Path, tmp_path: Path) -> None:
    report = quantize_model(folder, tmp_path / "out", QuantizeOptions(SCHEME, Method.RTN))
    source, result = open_model(folder), open_model(report.out)
    rounded = set()
    for slot in source.slots():
        before, after = source.weights.load(slot.name), result.weights.load(slot.name)
        assert isinstance(before, torch.Tensor)
        if not slot.is_linear:
            assert isinstance(after, torch.Tensor), slot.name
            assert torch.equal(before.float(), after.float()), slot.name
            continue
        assert isinstance(after, PackedWeight), slot.name
        assert torch.equal(after.dequantize(), rtn.quantize(before, SCHEME).dequantize())
        rounded.add(slot.role.value)
    assert rounded >= {"input", "output", "query", "down"}
    decoder = load_decoder(result, REFERENCE, torch.device("cpu"), torch.float32)
    assert bool(torch.isfinite(logits_in_steps(decoder, list(range(3, 20)), [9, 8])).all())
