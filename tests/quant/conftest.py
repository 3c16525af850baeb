"""A tiny Llama in a folder, for tests of the whole pipeline."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from appliance.model_files.checkpoint import write_safetensors

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
ALPHABET = (string.ascii_letters + string.digits)[:50]


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
    """Write a random Llama; arguments change its config, `tensors` replaces some weights."""

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


@pytest.fixture
def alphabet() -> str:
    """The characters that the model of fixture `model` can read, in the order of their tokens."""
    return ALPHABET


@pytest.fixture
def model(make_llama: MakeFolder) -> Path:
    """A tiny Llama that can read 50 letters and digits; some of its channels are loud."""
    generator = torch.Generator().manual_seed(5)
    loud = torch.logspace(-0.7, 0.7, 96)[torch.randperm(96, generator=generator)].bfloat16()
    norms = [
        f"model.layers.{layer}.{norm}.weight"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    folder = make_llama(tensors={name: loud.clone() for name in norms})
    backend = Backend(BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(3)
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abc":
        numbers = torch.randint(0, 50, (900,), generator=generator).tolist()
        (folder / f"{name}.txt").write_text("".join(ALPHABET[i] for i in numbers))
    (folder / "short.md").write_text("abc")
    (folder / "picture.png").write_bytes(b"\xff")
    return folder
