"""Tiny settings of models whose sequences each keep a cache of transformers' own class."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
}
_INDEX = {"index_topk": 5, "index_n_heads": 8, "index_head_dim": 16}
# Attention of other kinds; a state that is not described; positions that are compressed, indexed or
# biased; states that lie in modules; layers that share matrices; windows and convolutions at once.
OWN_CACHES: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 3, "n_head": 4, "seq_length": 128},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            *["compressed_sparse_attention"] * 2,
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "mlp_layer_types": ["hash_moe", *["moe"] * 3],
        "sliding_window": 7,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 2,
        "n_routed_experts": 4,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 1,
        **_EXPERTS,
        **_INDEX,
    },
    "diffllama": {},
    "doge": {"num_experts": 4},
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "lm_head_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    },
    "falcon_mamba": {"state_size": 16},
    "gpt_neo": {
        "num_hidden_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 7,
    },
    "hy_v4": _LATENT | _INDEX | _EXPERTS | {"n_group": 1, "topk_group": 1, "head_dim": 8},
    "inkling_text": {
        "sliding_window": 7,
        "num_experts": 4,
        "n_routed_experts": 4,
        **_EXPERTS,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 8,
        "num_experts": 4,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "model_max_length": 128,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 24,
        **(_LATENT | {"q_lora_rank": None}),
    },
    "lara_mini": {},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "n_groups": 2, "state_size": 16},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 101,
        "split_ngram_parts": 2,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 2,
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        **_EXPERTS,
    },
    "recurrent_gemma": {
        "lru_width": 64,
        "attention_window_size": 7,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "rwkv": {"num_hidden_layers": 4, "rescale_every": 2, "context_length": 128},
    "xglm": {"d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_d_state": 16,
        "kv_channels": 16,
        "hybrid_layer_ids": [1, 3],
        "num_query_groups": 4,
        "adapter_rank": 8,
    },
    "zaya": {
        "layer_types": ["hybrid"] * 3,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "router_hidden_size": 16,
    },
}
# Their class continues a text correctly only token by token.
ONE_BY_ONE = {"falcon_mamba", "jamba", "mamba", "recurrent_gemma", "zamba"}


def sizes_of(model_type: str) -> dict[str, Any]:
    """Return the settings of a tiny model, without those that its class lacks."""
    import transformers

    usual = transformers.AutoConfig.for_model(model_type)
    known = usual.to_dict().keys() | type(usual).attribute_map.keys()
    return {key: SIZES[key] for key in SIZES if key in known} | OWN_CACHES[model_type]
