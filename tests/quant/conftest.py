"""A tiny llama in a folder, for tests of the whole way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.checkpoint import write_safetensors

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

MakeFolder = Callable[..., Path]


def llama_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "mlp.gate_proj.weight": (middle, hidden),
            prefix + "mlp.up_proj.weight": (middle, hidden),
            prefix + "mlp.down_proj.weight": (hidden, middle),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    norms = ["model.norm.weight"] + [
        f"model.layers.{layer}.{norm}.weight"
        for layer in range(config["num_hidden_layers"])
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    dtype = getattr(torch, config["torch_dtype"])
    return {
        name: (torch.randn(shape, generator=generator) * 0.1).to(dtype)
        for name, shape in shapes.items()
    } | {name: torch.ones(hidden, dtype=dtype) for name in norms}


@pytest.fixture
def make_llama(tmp_path: Path) -> MakeFolder:
    """Write a random llama; arguments change its config, `tensors` replaces some weights."""

    def make(
        name: str = "source", *, tensors: dict[str, Tensor] | None = None, **changes: object
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = CONFIG | changes
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", llama_tensors(config) | (tensors or {}))
        (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        return folder

    return make
