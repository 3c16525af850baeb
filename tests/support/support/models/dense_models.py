"""Small decoders without experts or states: settings of each family, under its model_type."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALED_YARN = YARN | {
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "truncate": False,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}


def longrope(half: int, original: int, **extra: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [2.0 + 0.5 * i for i in range(half)],
        "original_max_position_embeddings": original,
    } | extra


# Like E2B: embeddings of each layer, and layers that read the keys and values of others.
GEMMA4_SMALL = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
}
# model_type, settings
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-head-dim": ("llama", {"head_dim": 16, "num_key_value_heads": 6}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-llama3-step": ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-scaled": ("llama", {"rope_parameters": SCALED_YARN}),
    "llama-yarn-no-scale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}},
    ),
    "llama-longrope": ("llama", {"rope_parameters": longrope(5, 32, factor=4.0)}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.7,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-window-bias": (
        "qwen3",
        {
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 12,
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
            },
        },
    ),
    "gemma3-capped": (
        "gemma3_text",
        {
            "head_dim": 12,
            "sliding_window": 7,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    # Like the large ones: two head sizes, and keys that serve as values.
    "gemma4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-small": ("gemma4_text", GEMMA4_SMALL),
    # As the 12B, of a class of its own. From layer 10 on the file's keys of layers are padded.
    "gemma4-unified": (
        "gemma4_unified_text",
        {
            "num_hidden_layers": 12,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite": (
        "granite",
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.5,
        },
    ),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "phi3-longrope-partial": (
        "phi3",
        {
            "rope_parameters": longrope(3, 32, partial_rotary_factor=0.6),
            "original_max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
    ),
}
