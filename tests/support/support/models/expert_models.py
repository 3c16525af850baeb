"""Small models with experts, with a router of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.models.causal_models import random_model, spread_weights
from support.models.model_families import SIZES

# Routers of every kind: dense layers among those with experts, a shared expert with and without
# gate, groups, a bias of the choice and of the logits, a scale; experts with biases and clamps.
LATENT = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe-one": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 24},
    ),
    # An indexer would choose among more positions than these.
    "deepseek_v32": (
        "deepseek_v32",
        LATENT
        | {
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "index_topk": 100,
            "index_head_dim": 32,
            "index_n_heads": 2,
        },
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        LATENT
        | {
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "indexer_types": ["full", "shared", "full"],
            "index_topk": 100,
            "index_head_dim": 32,
            "index_n_heads": 2,
        },
    ),
    # Chunks of 32 tokens, layers without positions whose queries grow every 4, inputs weighed.
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 56,
            "intermediate_size": 24,
            "attention_chunk_size": 32,
            "floor_scale": 4,
            "attn_scale": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "llama4-two": (
        "llama4_text",
        {
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1],
            "attention_bias": True,
        },
    ),
    # More heads where layers have windows, a gate of each head, bounds of gate and up by layer.
    "step3p7": (
        "step3p5",
        {
            "num_attention_heads": 4,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_sliding_attention_heads": 6,
            "sliding_window": 7,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "share_expert_dim": 40,
            "moe_router_scaling_factor": 1.7,
            "swiglu_limits": [None, 0.5, None, 0.7],
            "swiglu_limits_shared": [0.4, 0.6, None, 0.0],
            "rope_theta": [500.0, 100.0, 100.0, 500.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": (
        "granitemoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        LATENT
        | {
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    # Queries grow every 8 positions.
    "mistral4": (
        "mistral4",
        LATENT
        | {
            "q_lora_rank": 24,
            "head_dim": 32,
            "qk_nope_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT
        | {
            "q_lora_rank": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 32,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "dots1": (
        "dots1",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.3,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
    ),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "sliding_window": 7,
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
}


def save_experts(family: str, folder: Path) -> None:
    """Write a random model with experts."""
    model_type, settings = EXPERTS[family]
    torch.manual_seed(0)
    model = random_model(model_type, **SIZES | {"num_hidden_layers": 3} | settings)
    spread_weights(model)
    model.save_pretrained(folder)
