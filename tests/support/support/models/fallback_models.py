"""Tiny settings of models that transformers' modules run; some also have a family of ours."""

from __future__ import annotations

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
_ALL_HEADS = _SIZES | {"num_key_value_heads": 4}
# Each has features that few others have: biases, LayerNorm, parallel parts, partial rotation, norms
# of heads, windows, soft caps, sinks, scaled logits, layers without positions.
FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("stablelm", _SIZES | {"use_qkv_bias": True, "qk_layernorm": True}),
    "gpt_neox": ("gpt_neox", _ALL_HEADS | {"use_parallel_residual": True}),
    "cohere": ("cohere", _SIZES | {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2-window": (
        "cohere2",
        _SIZES
        | {
            "sliding_window": 7,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "logit_scale": 0.5,
        },
    ),
    "starcoder2-window": ("starcoder2", _SIZES | {"sliding_window": 7, "use_bias": True}),
    "olmo2": ("olmo2", _SIZES),
    "gemma2-caps": (
        "gemma2",
        _SIZES
        | {
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "phi": ("phi", _SIZES | {"partial_rotary_factor": 0.5}),
    "glm4": ("glm4", _SIZES | {"attention_bias": True}),
    "smollm3": ("smollm3", _SIZES | {"no_rope_layers": [1, 0, 1]}),
    "persimmon": ("persimmon", _ALL_HEADS),
    "helium": ("helium", _SIZES),
    "exaone4": ("exaone4", _SIZES | {"sliding_window": 7, "sliding_window_pattern": 2}),
    "granite_swa-sinks": ("granite_swa", _SIZES | {"sliding_window": 7}),
    "mimo-narrow-values": (
        "mimo_v2_flash",
        _SIZES
        | {
            "v_head_dim": 8,
            "swa_v_head_dim": 8,
            "sliding_window": 7,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "apertus": ("apertus", _SIZES),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        _SIZES
        | {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
            }
        },
    ),
    "hunyuan-experts": (
        "hunyuan_v1_moe",
        _SIZES | {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 24},
    ),
    "laguna": (
        "laguna",
        _SIZES
        | {
            "sliding_window": 7,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    # A tensor for each expert, under the makers' own names, which transformers converts at load.
    "minimax_m2-names": (
        "minimax_m2",
        _SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    # One bias under two names.
    "bert-decoder": ("bert-generation", _ALL_HEADS | {"is_decoder": True}),
    "gpt2": ("gpt2", {"hidden_size": 64, "num_attention_heads": 4, "n_inner": 96}),
}
