"""Settings of a small model of each family: of config.json, and of GGUF metadata."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONVOLUTIONS = {"norm_eps": 1e-5, "layer_types": ["conv", "full_attention"], "conv_L_cache": 4}
DELTA = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "mamba_ssm_dtype": "float32",
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.25,
    "logits_scaling": 2.0,
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
}
NEMOTRON_H = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# What each family reads beyond the sizes, under its model_type.
OF_FAMILY: dict[str, list[dict[str, Any]]] = {
    "llama": [{"rope_scaling": LLAMA3}, {"rope_scaling": YARN}, {"rope_theta": 1e4}],
    "mistral": [{"sliding_window": 3}],
    "ministral3": [
        {"sliding_window": 3, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    ],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}],
    "qwen3": [{"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}],
    "gemma3_text": [
        {
            "sliding_window": 3,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
    ],
    "gemma4_text": [
        {
            "sliding_window": 3,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 3.0,
        },
        {
            "sliding_window": 3,
            "layer_types": ["full_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
    ],
    "gemma4_unified_text": [
        {
            "num_hidden_layers": 11,
            "sliding_window": 3,
            "per_layer_config": {"05": {"head_dim": 32}, "10": {"head_dim": 32}},
        }
    ],
    "phi3": [
        {"partial_rotary_factor": 0.5, "rope_scaling": LONG},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
    ],
    "qwen3_moe": [
        EXPERTS | {"num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1},
        EXPERTS | {"num_local_experts": 4, "mlp_only_layers": [1]},
    ],
    "mixtral": [EXPERTS | {"num_local_experts": 4}],
    "qwen2_moe": [EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16}],
    "glm4_moe": [
        EXPERTS
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 1,
        }
    ],
    "gpt_oss": [
        EXPERTS
        | {
            "num_local_experts": 4,
            "sliding_window": 3,
            "swiglu_limit": 7.0,
            "swiglu_alpha": 1.7,
            "rope_scaling": YARN | {"truncate": False},
        }
    ],
    "qwen3_5_text": [DELTA, DELTA | {"layer_types": ["linear_attention", "full_attention"]}],
    "qwen3_5_moe_text": [
        EXPERTS | DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 16}
    ],
    "qwen3_next": [EXPERTS | DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 16}],
    "lfm2": [CONVOLUTIONS | {"block_ff_dim": 64}, {"norm_eps": 1e-5, "full_attn_idxs": [1]}],
    "lfm3": [
        CONVOLUTIONS
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 100.0}
                for kind in ("full_attention", "sliding_attention")
            },
        }
    ],
    "llama4_text": [
        {
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0],
            "attn_scale": 0.2,
            "floor_scale": 16,
        }
    ],
    "step3p5": [
        EXPERTS
        | {
            "n_routed_experts": 4,
            "share_expert_dim": 16,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
            "attention_other_setting": {"num_attention_heads": 4},
            "moe_layers_enum": "1",
            "swiglu_limits": [0.0, 7.0],
            "swiglu_limits_shared": [0.0, 16.0],
            "rope_theta": [5e6, 1e4],
            "partial_rotary_factors": [0.5, 1.0],
        }
    ],
    "lfm2_moe": [EXPERTS | CONVOLUTIONS | {"num_experts": 4, "num_dense_layers": 1}],
    "granite": [MULTIPLIERS],
    "granitemoe": [MULTIPLIERS | {"num_experts_per_tok": 2, "num_local_experts": 4}],
    "granitemoehybrid": [
        MULTIPLIERS
        | MAMBA2
        | {
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "shared_intermediate_size": 16,
        },
    ],
    "nemotron_h": [
        NEMOTRON_H | {"hybrid_override_pattern": "*-"},
        EXPERTS
        | NEMOTRON_H
        | {
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_shared_expert_intermediate_size": 16,
        },
    ],
    "bamba": [MAMBA2 | {"attn_layer_indices": [1]}],
    "deepseek_v2": [
        EXPERTS | LATENT | {"n_routed_experts": 4, "n_shared_experts": 1, "q_lora_rank": None},
        EXPERTS
        | LATENT
        | {
            "n_routed_experts": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ],
    "mistral4": [
        EXPERTS
        | LATENT
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN
            | {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5, "rope_theta": 1e4},
        }
    ],
    "opt": [
        {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        {"ffn_dim": 48, "enable_bias": False},
    ],
    "falcon": [
        {"ffn_hidden_size": 48, "num_kv_heads": 1, "new_decoder_architecture": True},
        {"layer_norm_epsilon": 1e-5, "multi_query": True, "rope_theta": 1e4},
    ],
    "dots1": [EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2}],
    "ernie4_5_moe": [{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}],
    "phi": [{"layer_norm_eps": 1e-5}],
    "nemotron": [{"attention_bias": True, "mlp_bias": True, "norm_eps": 1e-5}],
    "gpt_neox": [{"rotary_pct": 0.5}, {"use_parallel_residual": False}],
    "gemma": [{"hidden_act": "gelu"}],
    "gemma2": [
        {
            "sliding_window": 3,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
    ],
    "smollm3": [
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 3},
    ],
    "seed_oss": [{"attention_bias": True, "attention_out_bias": True}],
    "ernie4_5": [{"use_bias": True}],
    "glm": [{"partial_rotary_factor": 0.5}],
    "glm4": [{"rope_parameters": {"partial_rotary_factor": 0.5}}],
    "cohere": [{"logit_scale": 0.5, "layer_norm_eps": 1e-5}],
    "stablelm": [{"use_qkv_bias": True}, {"use_parallel_residual": True}],
    "starcoder2": [{"sliding_window": 3, "use_bias": True}],
    "bailing_moe_v2": [
        EXPERTS | {"num_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    ],
    "bailing_moe": [EXPERTS | {"num_experts": 4, "use_bias": False, "norm_head": True}],
    "baichuan": [{"num_key_value_heads": 2}],
    "qwen": [{"num_key_value_heads": 2, "intermediate_size": 96}],
    "chatglm": [{"multi_query_attention": True, "add_qkv_bias": True, "rope_ratio": 50}],
    "minicpm": [{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}],
    "minicpm3": [LATENT | {"num_key_value_heads": 2, "q_lora_rank": 24}],
    "internlm2": [{"bias": True}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}],
    "olmo2": [{"attention_bias": True}],
    "arcee": [{"mlp_bias": True}],
    "exaone": [{"layer_norm_epsilon": 1e-5, "activation_function": "silu"}],
    "olmoe": [{"num_experts": 4, "num_experts_per_tok": 2}],
    "olmo3": [
        {
            "sliding_window": 3,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 1e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    ],
    "exaone4": [{"sliding_window": 3, "sliding_window_pattern": 2}],
    "hunyuan_v1_dense": [
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0}}
    ],
    "hunyuan_v1_moe": [
        {
            "num_experts": 4,
            "moe_topk": [2, 2],
            "moe_intermediate_size": [48, 48],
            "num_shared_expert": [1, 1],
        }
    ],
    "minimax_m2": [
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "use_qk_norm": True}
    ],
    "cohere2": [{"logit_scale": 0.5, "sliding_window": 3, "sliding_window_pattern": 2}],
    "deepseek_v3": [
        EXPERTS
        | LATENT
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_scaling": YARN | {"mscale_all_dim": 1.0},
        }
    ],
    "deepseek_v32": [
        EXPERTS | LATENT | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "index_topk": 32}
    ],
    "glm_moe_dsa": [
        EXPERTS
        | LATENT
        | {"n_routed_experts": 4, "index_topk": 32, "mlp_layer_types": ["dense", "sparse"]}
    ],
    "glm4_moe_lite": [
        EXPERTS
        | LATENT  # of which head_dim is another name of qk_rope_head_dim
        | {"head_dim": 8, "n_routed_experts": 4, "mlp_layer_types": ["dense", "sparse"]}
    ],
}
GGUF_SIZES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 16,
    "rope.freq_base": 1e4,
}
GGUF_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}
GGUF_DELTA = {
    "full_attention_interval": 2,
    "ssm.conv_kernel": 3,
    "ssm.state_size": 16,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 2,
    "ssm.inner_size": 32,
}
GGUF_CONVOLUTIONS = {"attention.head_count_kv": [0, 1], "shortconv.l_cache": 3}
GGUF_MAMBA2 = {
    "attention.head_count_kv": [0, 1],
    "ssm.conv_kernel": 3,
    "ssm.state_size": 16,
    "ssm.group_count": 1,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}
GGUF_LATENT = {
    "attention.q_lora_rank": 16,
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 16,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
}
GGUF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0,
             "rope.scaling.original_context_length": 32,
             "rope.scaling.yarn_log_multiplier": 1.0}  # fmt: skip
GGUF_SCALES = {"attention.scale": 0.25, "embedding_scale": 3.0, "residual_scale": 0.5,
               "logit_scale": 2.0}  # fmt: skip
OF_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "llama": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "qwen2": {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0,
              "rope.scaling.original_context_length": 32},
    "qwen3": {},
    "qwen2vl": {"rope.dimension_sections": [2, 3, 3, 0]},
    "qwen3vl": {"rope.dimension_sections": [2, 3, 3, 0], "n_deepstack_layers": 3},
    "qwen3vlmoe": GGUF_EXPERTS | {"n_deepstack_layers": 3},
    "gemma3": {"attention.sliding_window": 3, "attention.sliding_window_pattern": 2},
    "phi3": {"attention.sliding_window": 3, "rope.scaling.attn_factor": 1.0,
             "rope.scaling.original_context_length": 32},
    "qwen3moe": GGUF_EXPERTS,
    "qwen2moe": GGUF_EXPERTS | {"expert_shared_feed_forward_length": 16},
    "glm4moe": GGUF_EXPERTS | {"expert_shared_count": 1, "expert_group_count": 2,
                               "expert_group_used_count": 1, "expert_weights_scale": 2.0,
                               "leading_dense_block_count": 1, "expert_gating_func": 2},
    "gpt-oss": GGUF_EXPERTS | {"attention.sliding_window": 3, "rope.scaling.type": "yarn",
                               "rope.scaling.factor": 2.0,
                               "rope.scaling.original_context_length": 32},
    "qwen35": GGUF_DELTA,
    "qwen35moe": GGUF_DELTA | GGUF_EXPERTS | {"expert_shared_feed_forward_length": 16},
    "qwen3next": GGUF_DELTA | GGUF_EXPERTS | {"expert_shared_feed_forward_length": 16},
    "mistral3": GGUF_YARN | {"attention.temperature_scale": 0.1},
    "mistral4": GGUF_YARN | GGUF_LATENT | GGUF_EXPERTS | {"attention.temperature_scale": 0.1,
                                                          "expert_shared_count": 1},
    "deepseek2": GGUF_YARN | GGUF_LATENT | GGUF_EXPERTS | {"leading_dense_block_count": 1,
                                                           "expert_weights_scale": 2.0},
    "granite": GGUF_SCALES,
    "granitemoe": GGUF_SCALES | GGUF_EXPERTS,
    "granitehybrid": GGUF_SCALES | GGUF_MAMBA2 | GGUF_EXPERTS | {
        "rope.scaling.finetuned": False, "expert_shared_feed_forward_length": 16},
    "nemotron_h": GGUF_MAMBA2 | {"feed_forward_length": [0, 48], "block_count": 2},
    "nemotron_h_moe": GGUF_MAMBA2 | GGUF_EXPERTS | {
        "feed_forward_length": [0, 16], "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 16, "expert_weights_norm": True},
    "gemma4": {"attention.sliding_window": 3, "attention.sliding_window_pattern": [True, False],
               "attention.shared_kv_layers": 0, "attention.key_length_swa": 16,
               "rope.freq_base_swa": 1e4, "final_logit_softcapping": 3.0},
    "falcon": {"attention.layer_norm_epsilon": 1e-5},
    "nemotron": {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8,
                 "rope.scaling.type": "none", "vocab_size": 40},
    "phi2": {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 8},
    "gptneox": {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 4,
                "attention.head_count_kv": 2, "use_parallel_residual": True},
    "gemma": {},
    "gemma2": {"attention.sliding_window": 3, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0},
    "smollm3": {},
    "seed_oss": {},
    "ernie4_5": {},
    "ernie4_5-moe": GGUF_EXPERTS | {"expert_shared_count": 1, "leading_dense_block_count": 1,
                                    "interleave_moe_layer_step": 1},
    "llama4": GGUF_EXPERTS | {"interleave_moe_layer_step": 2},
    "dots1": GGUF_EXPERTS | {"expert_shared_count": 1, "leading_dense_block_count": 1,
                             "expert_weights_norm": True},
    "glm4": {"nextn_predict_layers": 1, "block_count": 3},
    "command-r": {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5},
    "stablelm": {"attention.layer_norm_epsilon": 1e-5, "use_parallel_residual": True},
    "starcoder2": {"attention.layer_norm_epsilon": 1e-5},
    "internlm2": {},
    "baichuan": {"attention.head_count_kv": 2},
    "bailingmoe": GGUF_EXPERTS | {"expert_shared_count": 1, "expert_weights_norm": True,
                                  "leading_dense_block_count": 1},
    "qwen": {"attention.head_count_kv": 2},
    "chatglm": {"rope.dimension_count": 8},
    "minicpm": {"embedding_scale": 12.0, "residual_scale": 0.5, "logit_scale": 2.0},
    "minicpm3": {
        "attention.q_lora_rank": 8,
        "attention.kv_lora_rank": 8,
        "attention.key_length": 16,
        "rope.dimension_count": 8,
    },
    "olmo2": {"attention.sliding_window": 3, "attention.sliding_window_pattern": [True, False]},
    "exaone4": {"attention.sliding_window": 3, "attention.sliding_window_pattern": 2},
    "hunyuan-dense": {"rope.scaling.type": "none"},
    "hunyuan-moe": GGUF_EXPERTS | {"expert_shared_count": 1},
    "minimax-m2": GGUF_EXPERTS | {"expert_gating_func": 2, "rope.dimension_count": 8},
    "cohere2": {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5,
                "attention.sliding_window": 3},
    "lfm2": GGUF_CONVOLUTIONS,
    "lfm2moe": GGUF_CONVOLUTIONS | GGUF_EXPERTS | {"leading_dense_block_count": 1},
}  # fmt: skip
