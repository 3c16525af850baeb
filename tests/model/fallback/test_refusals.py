"""Models that transformers' modules cannot serve are refused by name, with the native families."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models.causal_models import random_model
from support.models.fallback_models import FALLBACKS
from support.models.own_cache_models import sizes_of

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.model.fallback.decoder import SeenPositions, seen_positions
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAMBA = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97}


@pytest.fixture
def folder(make_model: Callable[..., Any], save: Callable[[Any], Path]) -> Path:
    model_type, settings = FALLBACKS["cohere2-window"]
    return save(make_model(model_type, **settings))


def configured(folder: Path, **settings: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (MAMBA | SMALL, "recurrent|has no|failed"),
        (
            {"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"]},
            "recurrent|refuses",
        ),
        (
            {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 2},
            "attention|failed",
        ),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal"),
        ({"model_type": "new", "architectures": ["NewForCausalLM"]}, "no causal language model"),
        ({"model_type": "new", "auto_map": {"AutoModel": "a.B"}}, r"\(auto_map\) is never run"),
        (
            {
                "model_type": "glm_moe_dsa",
                "architectures": ["GlmMoeDsaForCausalLM"],
                "layer_types": None,
                "num_hidden_layers": 4,
            },
            "layer_types has 'indexed_attention': .* indexed ones",
        ),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types has 'chunked_attention'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type = 'dynamic'",
        ),
        ({"is_causal": False}, "both directions"),
        # Each of these was once accepted, and the answer depended on cuts or had wrong positions.
        (
            {"model_type": "bert-generation", "architectures": ["BertGenerationDecoder"]},
            "is_decoder = False",
        ),
        (
            {
                "model_type": "roberta-prelayernorm",
                "architectures": ["RobertaPreLayerNormForCausalLM"],
                "is_decoder": True,
            },
            "counts positions from the number of its padding token",
        ),
        (
            {"model_type": "trocr", "architectures": ["TrOCRForCausalLM"]},
            "encoder_attn attends to what an encoder says",
        ),
        ({"hidden_act": "situ"}, "knows no kind 'situ'"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name_with_the_native_families(
    folder: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        open_model(configured(folder, **settings))
    assert "choose a model among LlamaForCausalLM, " in str(caught.value)


def test_a_number_out_of_range_is_refused_before_anything_is_built(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000000000"):
        open_model(configured(folder, num_hidden_layers=10**9))


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape \(96, 64\)"):
        open_model(configured(folder, intermediate_size=112))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.4\.\S+ is missing"):
        open_model(configured(folder, num_hidden_layers=5, layer_types=None))


def test_masks_are_read_as_windows_and_others_refused() -> None:
    def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - 7)

    def chunks(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key // 16 == query // 16)

    def ahead(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return torch.ones_like(key, dtype=torch.bool)

    assert seen_positions(causal, 100) == SeenPositions(None)
    assert seen_positions(window, 100) == SeenPositions(7)
    for other in (chunks, ahead):
        with pytest.raises(UnsupportedModelError, match="mask shows position"):
            seen_positions(other, 100)


def test_what_has_no_value_is_refused_before_it_is_loaded(
    save: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.falcon_h1 import modeling_falcon_h1 as theirs

    folder = save(random_model("falcon_h1", **sizes_of("falcon_h1")))
    monkeypatch.delattr(theirs.FalconH1PreTrainedModel, "_init_weights")
    with pytest.raises(UnsupportedModelError, match=r"mup_vector is in no checkpoint"):
        open_model(folder)
