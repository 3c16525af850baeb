"""Reading configs: old and new spellings, and settings that are refused rather than ignored."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.causal_models import random_model

import appliance
from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.model.families.registry import FAMILIES, family_of_gguf
from appliance.model.spec import DecoderSpec, RopeScaling
from bench.lib.families import family_of_config

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
GEMMA3 = BASE | {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 16,
    "sliding_window": 32,
    "hidden_activation": "gelu_pytorch_tanh",
}


def spec_of(config: dict[str, Any]) -> DecoderSpec:
    return family_of_config(config).spec(config)


def windows_of(spec: DecoderSpec) -> list[int | None]:
    return [attention.window for attention in spec.attention_layers.values()]


def test_rope_settings_of_both_styles_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    new = {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}}
    spec = spec_of(BASE | new)
    assert spec == spec_of(BASE | old)
    assert spec.attention_layers[0].rope.scaling is RopeScaling.LLAMA3
    assert spec.attention_layers[0].rope.theta == 5e5


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 256}, 1024),  # Qwen's instructions
        ({"factor": 4.0}, 1024),
        ({"factor": 4.0, "original_max_position_embeddings": 32}, 256),
    ],
)
def test_yarn_says_for_how_many_tokens_it_is(rope: dict[str, Any], context: int) -> None:
    """vLLM's rule for the longest context: the original one times the factor."""
    spec = spec_of(BASE | {"rope_scaling": rope | {"rope_type": "yarn"}})
    assert spec.context_length == context


def test_yarn_takes_the_multiple_of_its_attention_factor_that_its_maker_gives() -> None:
    """The settings are DeepSeek-R1-0528-Qwen3-8B's; by vLLM's rule they make the usual factor 1."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = spec_of(BASE | {"rope_scaling": yarn | {"attn_factor": 0.8782488562869419}})
    assert rope.attention_layers[0].rope.attention_factor == pytest.approx(1.0, abs=1e-6)
    linear = {"rope_type": "linear", "factor": 4.0, "attn_factor": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"attn_factor = 0\.5"):
        spec_of(BASE | {"rope_scaling": linear})


def test_a_router_by_sigmoids_may_be_named_after_its_method() -> None:
    """dots.llm1's settings do so; llama.cpp's converter takes it for sigmoids."""
    experts = {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
    }
    spec = spec_of(BASE | experts)
    assert spec == spec_of(BASE | experts | {"scoring_func": "noaux_tc"})
    with pytest.raises(UnsupportedModelError, match="scoring_func = 'softmax'"):
        spec_of(BASE | experts | {"scoring_func": "softmax"})


def test_rope_settings_per_layer_type_of_both_styles_mean_the_same() -> None:
    old = {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
        },
        "layer_types": ["full_attention" if i in (2, 5) else "sliding_attention" for i in range(7)],
    }
    spec = spec_of(GEMMA3 | new)
    assert spec == spec_of(GEMMA3 | old)
    assert windows_of(spec) == [32, 32, None, 32, 32, None, 32]
    assert [spec.attention_layers[index].rope.theta for index in (1, 2)] == [3e4, 2e6]
    assert [spec.attention_layers[index].rope.factor for index in (1, 2)] == [1.0, 8.0]


def test_settings_that_configs_leave_out() -> None:
    assert not spec_of(BASE).tied_head
    assert spec_of(GEMMA3).tied_head
    assert spec_of(GEMMA3).embedding_scale == 8.0
    assert windows_of(spec_of(GEMMA3))[-2:] == [None, 32]
    mistral = BASE | {"architectures": ["MistralForCausalLM"]}
    assert windows_of(spec_of(mistral))[0] == 4096
    assert windows_of(spec_of(mistral | {"sliding_window": None}))[0] is None
    qwen = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}
    assert windows_of(spec_of(qwen))[-1] is None
    windowed = spec_of(qwen | {"use_sliding_window": True, "max_window_layers": 5})
    assert windows_of(windowed) == [None] * 5 + [8, 8]


@pytest.mark.parametrize("model_type", ["mixtral", "mistral", "phi3", "starcoder2"])
def test_a_window_of_nothing_is_refused_as_transformers_has_no_answer(model_type: str) -> None:
    sizes = BASE | {"sliding_window": 0, "pad_token_id": 0, "num_hidden_layers": 2}
    model = random_model(model_type, **{key: sizes[key] for key in sizes if key != "architectures"})
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(torch.tensor([[5, 6, 7]]))  # a cache of -1 tokens
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    with pytest.raises(CheckpointError, match=r"sliding_window is 0, but must be"):
        spec_of(config)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'"),
        ({"rope_parameters": {"rope_type": "axial"}}, "'axial'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "15 elements"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"layer_types": ["sliding_attention"] * 7}, "layer_types"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"attention_multiplier": 0.1, "auto_map": {}}, "attention_multiplier"),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 7},
            "use_sliding_window",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 5.0}},
            "rope_theta",
        ),
        (
            {
                "architectures": ["Gemma4UnifiedForCausalLM"],
                "per_layer_config": {"6": {"head_dim": 32}, "06": {"head_dim": 32}},
            },
            "per_layer_config: 06 = .* and 6 is the same layer",
        ),
        (
            {"architectures": ["Gemma4ForCausalLM"], "per_layer_config": {"12": {}}},
            "per_layer_config: 12 = .* below num_hidden_layers = 7",
        ),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling",
        ),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        spec_of(BASE | settings)


def test_baichuan_13b_is_refused_for_its_alibi() -> None:
    """Its config.json has model_max_length instead of the 7B models' max_position_embeddings."""
    settings = {**BASE, "architectures": ["BaichuanForCausalLM"], "model_max_length": 4096}
    del settings["max_position_embeddings"]
    with pytest.raises(UnsupportedModelError, match=r"max_position_embeddings .* ALiBi"):
        spec_of(settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_dropout": 0.1, "torch_dtype": "bfloat16", "pretraining_tp": 4},
        {"sliding_window": None, "layer_types": ["full_attention"] * 7, "mlp_bias": False},
        {"rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": 1.0},
        # They are no settings of Llama's class, in transformers or elsewhere.
        {"final_logit_softcapping": 30.0, "attention_multiplier": 0.1, "use_qk_norm": True},
        {"num_local_experts": 8, "no_rope_layers": [1, 1, 0], "qkv_bias": True},
    ],
)
def test_what_does_not_change_the_arithmetic_is_accepted(settings: dict[str, Any]) -> None:
    assert spec_of(BASE | settings) == spec_of(BASE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": None}, "hidden_size is null, .*; remove it, which means 4096$"),
        ({"hidden_size": "64"}, "hidden_size is '64', but must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"architectures": ["Qwen2ForCausalLM"], "max_window_layers": -1}, "max_window_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_scaling": [1]}, "rope_scaling is"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing, .*; add it"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "a list of 8 numbers"),
    ],
)
def test_a_damaged_config_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_of(BASE | settings)


def test_a_config_without_architectures_is_of_its_model_type() -> None:
    """transformers' AutoModelForCausalLM selects by model_type alone."""
    nothing: list[dict[str, Any]] = [{}, {"architectures": None}, {"architectures": []}]
    for without in nothing:
        assert family_of_config({"model_type": "qwen3"} | without).name == "qwen3"
    assert family_of_config({"architectures": ["LLaMAForCausalLM"]}).name == "llama"


def test_an_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*Phi3ForCausalLM"):
        family_of_config({"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnsupportedModelError, match="names neither an architecture nor a model_"):
        family_of_config({})
    with pytest.raises(UnsupportedModelError, match=r"'new'.*llama.*phi3"):
        family_of_gguf({"general.architecture": "new"})


# Families whose files another program writes in a way of its own, which that format's reader knows.
TOLD_APART = {"quant/formats/exl3.py": {"mistral4"}}


def test_no_other_code_knows_a_family_by_name() -> None:
    names = {
        name for f in FAMILIES for name in (f.name, f.model_type, *f.architectures)
    }  # fmt: skip
    root = Path(appliance.__file__).parent
    files = [
        path
        for folder in ("model", "engine", "kernels", "quant")
        for path in (root / folder).rglob("*.py")
        if "families" not in path.relative_to(root).parts
    ]
    assert len(files) > 20
    for path in files:
        strings = {
            node.value for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }  # fmt: skip
        told = TOLD_APART.get(f"{path.relative_to(root)}", set())
        assert told <= strings, path
        assert not strings & names - told, path
