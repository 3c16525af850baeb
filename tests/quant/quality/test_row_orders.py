"""Families that store a head's rows in an order of their own, measured layer by layer.

The right values are the losses of transformers' class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.causal_models import random_model, spread_weights
from support.models.expert_models import EXPERTS
from support.models.makers_models import MAKERS, save_as_maker

from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.quality.make_card import EvaluationOptions, evaluate
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.held_out import Windows

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GLM = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
}
# model_type, settings; heads rotate by neighbours, or a key head's rows lie together.
REORDERED: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("glm", GLM | {"attention_bias": False}),
    "glm-biases": ("glm", GLM | {"attention_bias": True}),
    "glm4": ("glm4", GLM | {"attention_bias": False}),
    "glm4-biases": ("glm4", GLM | {"attention_bias": True}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": False}),
    "ernie4_5-biases": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": EXPERTS["ernie4_5_moe"],
    "cohere": ("cohere", {"attention_bias": False}),
    "cohere-biases": ("cohere", {"attention_bias": True}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 7, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "llama4": EXPERTS["llama4"],
    "llama4-biases": EXPERTS["llama4-two"],
    "falcon": (
        "falcon",
        {"ffn_hidden_size": 76, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "gpt_neox": ("gpt_neox", {}),
}
WINDOWS = Windows(
    torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(3)), 40, "made up"
)


def written(case: str, folder: Path) -> Any:
    """Write a case's model; return transformers'."""
    torch.manual_seed(0)
    maker = MAKERS.get(case)
    if maker is not None:
        model = random_model(maker.relative, **SIZES | maker.settings)
    else:
        model_type, settings = REORDERED[case]
        model = random_model(model_type, **SIZES | settings)
    spread_weights(model)
    if maker is not None:
        save_as_maker(case, model, folder)
    else:
        model.save_pretrained(folder)
    return model


def losses(model: Any) -> Tensor:
    """Of each token but a window's first, (num_windows * (window - 1),) float64."""
    with torch.inference_mode():
        found: Tensor = model(WINDOWS.tokens).logits[:, :-1].double().log_softmax(-1)
    return -found.gather(-1, WINDOWS.tokens[:, 1:, None]).flatten()


@pytest.mark.parametrize("case", [*REORDERED, "chatglm", "internlm2"])
def test_a_card_measures_what_transformers_computes(case: str, tmp_path: Path) -> None:
    expected = losses(written(case, tmp_path / "base"))
    quantize_model(tmp_path / "base", tmp_path / "out", QuantizeOptions(WeightScheme(8, None)))
    base, candidate = open_model(tmp_path / "base"), open_model(tmp_path / "out")
    assert base.fallback is None
    found = evaluate(base, WINDOWS, EvaluationOptions())
    torch.testing.assert_close(found.candidate.values, expected, atol=1e-3, rtol=0)
    rounded = evaluate(candidate, WINDOWS, EvaluationOptions(base))
    assert rounded.against is not None
    assert 0 < rounded.against.summary().kld_mean.value < 0.02
