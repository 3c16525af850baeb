"""Write GGUF files with random weights, for speed and memory only.

Numbers are random codes, so that a file is made as fast as it is written. Its vocabulary holds
made-up words: any server can load it and say something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from ggml_models import blocks_of

if TYPE_CHECKING:
    from pathlib import Path

Q4, Q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
_CODE_BYTES = {Q4: 16, Q8: 32}  # of a block of 32, after its scale in two bytes
_MIDDLE = {Q4: 8.0, Q8: 128.0}


def write_qwen3_moe(path: Path, shape: dict[str, Any]) -> None:
    """Write a file of the qwen3moe architecture.

    Args:
        path: the file.
        shape: settings of a Hugging Face config.
    """
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _write_settings(writer, shape)
    random = np.random.default_rng(0)
    hidden, experts = shape["hidden_size"], shape["num_experts"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    middle = shape["moe_intermediate_size"]

    def quantized(name: str, *size: int, kind: gguf.GGMLQuantizationType = Q4) -> None:
        writer.add_tensor(f"{name}.weight", _blocks(random, size, kind), raw_dtype=kind)

    def floats(name: str, data: np.ndarray[Any, Any]) -> None:
        writer.add_tensor(f"{name}.weight", data.astype(np.float32))

    quantized("token_embd", shape["vocab_size"], hidden, kind=Q8)
    for layer in range(shape["num_hidden_layers"]):
        block = f"blk.{layer}."
        for norm, width in (("attn_norm", hidden), ("ffn_norm", hidden)):
            floats(block + norm, np.ones(width))
        for norm in ("attn_q_norm", "attn_k_norm"):
            floats(block + norm, np.ones(shape["head_dim"]))
        quantized(block + "attn_q", queries, hidden)
        quantized(block + "attn_k", keys, hidden)
        quantized(block + "attn_v", keys, hidden)
        quantized(block + "attn_output", hidden, queries)
        floats(block + "ffn_gate_inp", random.standard_normal((experts, hidden)) * hidden**-0.5)
        quantized(block + "ffn_gate_exps", experts, middle, hidden)
        quantized(block + "ffn_up_exps", experts, middle, hidden)
        quantized(block + "ffn_down_exps", experts, hidden, middle)
    floats("output_norm", np.ones(hidden))
    quantized("output", shape["vocab_size"], hidden, kind=Q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(path: Path, shape: dict[str, Any], kind: str) -> None:
    """Write a dense file of the llama architecture, all of whose matrices have one type.

    Args:
        path: the file.
        shape: settings of a Hugging Face config.
        kind: a type that `ggml_models.blocks_of` makes, such as `Q4_K`.
    """
    writer = gguf.GGUFWriter(path, "llama")
    _write_settings(writer, shape)
    hidden, middle = shape["hidden_size"], shape["intermediate_size"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    number = gguf.GGMLQuantizationType[kind]

    def matrix(name: str, rows: int, width: int) -> None:
        few = blocks_of(kind, min(rows, 256), width, seed=len(writer.tensors[0]))
        few = few.reshape(len(few), -1)
        blocks = np.tile(few, (-(-rows // len(few)), 1))[:rows]
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=number)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))

    for layer in range(shape["num_hidden_layers"]):
        block = f"blk.{layer}."
        norm(block + "attn_norm")
        norm(block + "ffn_norm")
        matrix(block + "attn_q", queries, hidden)
        matrix(block + "attn_k", keys, hidden)
        matrix(block + "attn_v", keys, hidden)
        matrix(block + "attn_output", hidden, queries)
        matrix(block + "ffn_gate", middle, hidden)
        matrix(block + "ffn_up", middle, hidden)
        matrix(block + "ffn_down", hidden, middle)
    norm("output_norm")
    matrix("token_embd", shape["vocab_size"], hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: gguf.GGUFWriter, shape: dict[str, Any]) -> None:
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])
    if "num_experts" in shape:
        writer.add_expert_count(shape["num_experts"])
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
    count = shape["vocab_size"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [f"\u2581w{number}" for number in range(count - len(names))]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    kinds += [gguf.TokenType.NORMAL] * (count - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(names)
    writer.add_token_scores([-float(number) for number in range(count)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _blocks(
    random: np.random.Generator, size: tuple[int, ...], kind: gguf.GGMLQuantizationType
) -> np.ndarray[Any, Any]:
    """Make codes of all matrices, blocks of 32: (..., rows, bytes of a row)."""
    *outer, columns = size
    blocks = np.empty((*outer, columns // 32, 2 + _CODE_BYTES[kind]), dtype=np.uint8)
    scale = np.array([columns**-0.5 / _MIDDLE[kind]], dtype=np.float16).view(np.uint8)
    blocks[..., :2] = scale
    blocks[..., 2:] = random.integers(0, 256, blocks[..., 2:].shape, dtype=np.uint8)
    return blocks.reshape(*outer, -1)
