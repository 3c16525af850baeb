"""Small models of Llama's relatives, which differ in norms, positions or the order of rows."""

from __future__ import annotations

from typing import Any

WINDOW = {"sliding_window": 7}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        WINDOW
        | {
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "glm4": ("glm4", {}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere2": ("cohere2", WINDOW | {"logit_scale": 0.5, "num_hidden_layers": 4}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 4096}),
    "minicpm3": (
        "minicpm3",
        {
            "num_key_value_heads": None,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
    # Norms only after attention and MLP, of all heads at once, or after RoPE.
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        WINDOW
        | {
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "exaone4": ("exaone4", WINDOW | {"num_hidden_layers": 4}),
    "exaone4-full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "arcee": ("arcee", {}),
    "exaone": ("exaone", {}),
    "olmoe": (  # the norm of all heads is as wide as the stream
        "olmoe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "hidden_size": 96,
            "num_attention_heads": 6,
            "head_dim": 16,
        },
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "hunyuan_moe": ("hunyuan_v1_moe", {"num_experts": 5, "moe_topk": 2, "head_dim": 16}),
    "minimax_m2": (
        "minimax_m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 50.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}
# Families that GGUF metadata cannot describe, or whose own GGUF architecture we do not read.
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3-slides": (
        "smollm3",
        WINDOW
        | {
            "use_sliding_window": True,
            "no_rope_layers": [0, 1, 0],
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "seed_oss-bias": ("seed_oss", {"attention_out_bias": True, "attention_bias": False}),
    "ernie4_5-bias": ("ernie4_5", {"use_bias": True}),
    "glm": ("glm", {}),
    "starcoder2-window": ("starcoder2", WINDOW | {"use_bias": False}),
    "hunyuan-alpha": (
        "hunyuan_v1_dense",
        {
            "attention_bias": True,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 50.0,
                "factor": 1.0,
                "alpha": 9.0,
            },
        },
    ),
    # Llama's class with other settings; RoPE that would grow beyond its context.
    "internlm3": (
        "internlm3",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 6.0},
        },
    ),
    "cohere-bias": ("cohere", {"attention_bias": True, "logit_scale": 0.5}),
    "cohere2-full": (
        "cohere2",
        {"layer_types": ["full_attention"] * 3, "logit_scale": 0.5},
    ),
}
