"""Models with layers that do not attend, evaluated layer by layer, equal models in memory whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.causal_models import random_model
from support.models.recurrent_models import RECURRENT, Running, advance
from support.models.teacher_forcing import BLOCK_SIZE

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.make_card import EvaluationOptions, evaluate
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.held_out import Windows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
LENGTH = 40
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
WINDOWS = Windows(
    torch.randint(60, (2, LENGTH), generator=torch.Generator().manual_seed(3)), LENGTH, "made up"
)


def whole(path: Path, kv: Sequence[LayerPrecision] | None = None) -> Tensor:
    """Log probabilities of a model that is in memory whole, (places, vocab_size) float64."""
    decoder = load_decoder(open_model(path), REFERENCE, CPU, torch.float32)
    rows = []
    for ids in WINDOWS.tokens:
        cache = decoder.allocate_cache(
            kv or KVFormat.FP32, num_blocks=3, block_size=BLOCK_SIZE, num_states=1
        )
        running = Running(ids.tolist(), (0, 1, 2), slot=0)
        rows.append(advance(decoder, cache, [(running, LENGTH)])[0][:-1])
    return torch.cat(rows).double().log_softmax(-1)


def mean_kld(base: Tensor, candidate: Tensor) -> float:
    return float((base.exp() * (base - candidate)).sum(-1).mean())


# Gates in the queries and scales of logits; attention early, late and in the middle.
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h", "granite4"])
def test_a_hybrid_loses_what_it_loses_as_a_whole(name: str, tmp_path: Path) -> None:
    model_type, settings = RECURRENT[name]
    torch.manual_seed(0)
    model: Any = random_model(model_type, **SIZES | settings).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(tmp_path / "base")
    quantize_model(tmp_path / "base", tmp_path / "out", QuantizeOptions(WeightScheme(4, 32)))
    base, candidate = open_model(tmp_path / "base"), open_model(tmp_path / "out")
    kv = [LayerPrecision(KVFormat.INT8) for _ in candidate.spec.cache_layers]
    found = evaluate(candidate, WINDOWS, EvaluationOptions(base, kv={"int8": tuple(kv)}))
    assert found.against is not None
    exact = whole(tmp_path / "base")
    lost = mean_kld(exact, whole(tmp_path / "out"))
    assert lost > 1e-5
    assert found.against.summary().kld_mean.value == pytest.approx(lost, rel=1e-2)
    expected = mean_kld(whole(tmp_path / "out"), whole(tmp_path / "out", kv))
    assert found.kv["int8"].summary().kld_mean.value == pytest.approx(expected, rel=0.1, abs=1e-7)
    assert len(found.layers) == len(candidate.spec.layers)
