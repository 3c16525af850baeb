"""Write GGUF files with random weights, for speed and memory only.

Numbers are random codes, so that a file is made as fast as it is written. Its vocabulary holds
made-up words: any server can load it and say something.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from support.gguf.ggml_models import blocks_of

from appliance.model.tensors import Role, tensor_slots
from bench.lib.families import family_of_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.tensors import TensorSlot

Q4, Q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
_CODE_BYTES = {Q4: 16, Q8: 32}  # of a block of 32, after its scale in two bytes
_MIDDLE = {Q4: 8.0, Q8: 128.0}
# Names of a file's settings and of a config's; a config has some of them.
_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}


def write_model(
    path: Path, shape: dict[str, Any], type_of: Callable[[TensorSlot], str] | None = None
) -> None:
    """Write a file of the architecture that a config names: Llama's or one of Qwen's with experts.

    Args:
        path: the file.
        shape: settings of a Hugging Face config.
        type_of: names the type of a matrix, one that `ggml_models.blocks_of` makes, such as `Q4_K`;
            Q4_0 with Q8_0 for the embedding and the head if it is None.
    """
    family = family_of_config(shape)
    assert family.gguf is not None
    writer = gguf.GGUFWriter(path, family.gguf.architecture)
    _write_settings(writer, family.gguf.architecture, shape)
    random, written = np.random.default_rng(0), set[str]()
    for slot in tensor_slots(family.spec(shape), family.gguf.names):
        if slot.name in written:
            continue
        written.add(slot.name)
        size = slot.shape if slot.expert is None else (shape["num_experts"], *slot.shape)
        kind = _kind_of(slot)
        if kind is None:
            data = _floats(random, slot)
            writer.add_tensor(slot.name, data.astype(np.float32))
        elif type_of is not None:
            type_name = type_of(slot)
            data = _repeated(type_name, size, seed=len(written))
            writer.add_tensor(slot.name, data, raw_dtype=gguf.GGMLQuantizationType[type_name])
        else:
            writer.add_tensor(slot.name, _blocks(random, size, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind_of(slot: TensorSlot) -> gguf.GGMLQuantizationType | None:
    if slot.role in (Role.EMBEDDING, Role.HEAD):
        return Q8
    return Q4 if slot.is_linear else None


def _floats(random: np.random.Generator, slot: TensorSlot) -> np.ndarray[Any, Any]:
    """Make a tensor that is not quantized, as a converter would shape it."""
    if slot.role is Role.RATE and len(slot.shape) == 1 and not slot.name.endswith(".bias"):
        decay: np.ndarray[Any, Any] = -np.exp(random.standard_normal(slot.shape))
        return decay  # how fast a state forgets
    if slot.role in (Role.ROUTER, Role.RATE, Role.FILTER):
        shape = tuple(size for size in slot.shape if size != 1)
        found: np.ndarray[Any, Any] = random.standard_normal(shape) * shape[-1] ** -0.5
        return found
    return np.ones(slot.shape, dtype=np.float32)


def _write_settings(writer: gguf.GGUFWriter, architecture: str, shape: dict[str, Any]) -> None:
    for key, name in _SETTINGS.items():
        if name in shape:
            is_real = isinstance(shape[name], float)
            add = writer.add_float32 if is_real else writer.add_uint32
            add(f"{architecture}.{key}", shape[name])
    width = "intermediate_size" if "intermediate_size" in shape else "moe_intermediate_size"
    writer.add_feed_forward_length(shape[width])
    turning = int(shape["head_dim"] * shape.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(turning)
    if "linear_value_head_dim" in shape:
        writer.add_ssm_inner_size(shape["linear_value_head_dim"] * shape["linear_num_value_heads"])
        part = turning // 2 // 3
        writer.add_array(
            f"{architecture}.rope.dimension_sections", [turning // 2 - 2 * part, part, part, 0]
        )
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


def _repeated(type_name: str, size: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Make blocks of any type; making them is slow, so the same rows are repeated."""
    rows = prod(size[:-1])
    few = blocks_of(type_name, min(rows, 256), size[-1], seed=seed)
    few = few.reshape(len(few), -1)
    return np.tile(few, (-(-rows // len(few)), 1))[:rows].reshape(*size[:-1], -1)
