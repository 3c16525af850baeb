"""A tiny model of every family of decoders, with all that sets it apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},  # biases of query, key and value
    "qwen3": {},  # norms of heads
    "gemma3_text": {"query_pre_attn_scalar": 16},  # norms about 1 and after each part
    "phi3": {"pad_token_id": 0},  # fused weights
    "glm4": {"pad_token_id": 0, "attention_bias": True},  # half a head rotates, by neighbours
    "ernie4_5": {"pad_token_id": 0, "use_bias": True},  # heads rotate by neighbours
}


def random_family(family: str) -> Any:
    """A random model of 60 tokens, float32, with two layers and norms that are not 1."""
    config: Any = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(8)
    return model


def write_family(family: str, folder: Path) -> Path:
    """Write a family's random model."""
    random_family(family).save_pretrained(folder)
    return folder
