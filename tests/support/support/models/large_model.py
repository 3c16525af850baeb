"""Writes a model of any size quickly: its weights are zeros in a sparse file."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = "abcdefgh"
_SEPARATE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
_FUSED = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}


def write_large_model(
    folder: Path,
    *,
    hidden: int,
    middle: int,
    layers: int,
    vocab: int,
    experts: int = 0,
    fused: bool = False,
) -> int:
    """Write a Llama that the quantizer reads, with a tokenizer of eight letters; return its bytes.

    Args:
        experts: makes it a Qwen3 with so many in each layer; a token uses four.
        fused: makes it a gpt-oss, which stores all experts of a layer in one tensor.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if experts:
        config |= _FUSED if fused else _SEPARATE | {"moe_intermediate_size": middle}
        config["num_local_experts" if fused else "num_experts"] = experts
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (hidden, hidden)
        if fused:
            shapes |= _fused_shapes(prefix, hidden, middle, experts)
        elif experts:
            shapes[f"{prefix}mlp.gate.weight"] = (experts, hidden)
            for name in "qk":
                shapes[f"{prefix}self_attn.{name}_norm.weight"] = (64,)
        for part in _mlps(experts, fused):
            for name in ("gate", "up"):
                shapes[f"{prefix}{part}.{name}_proj.weight"] = (middle, hidden)
            shapes[f"{prefix}{part}.down_proj.weight"] = (hidden, middle)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return end


def _mlps(experts: int, fused: bool) -> list[str]:
    if fused:
        return []
    return [f"mlp.experts.{i}" for i in range(experts)] or ["mlp"]


def _fused_shapes(
    prefix: str, hidden: int, middle: int, experts: int
) -> dict[str, tuple[int, ...]]:
    attention = {f"self_attn.{name}_proj.bias": (hidden,) for name in "qkvo"}
    shapes: dict[str, tuple[int, ...]] = attention | {
        "self_attn.sinks": (hidden // 64,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * middle),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * middle),
        "mlp.experts.down_proj": (experts, middle, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }
    return {prefix + name: shape for name, shape in shapes.items()}
