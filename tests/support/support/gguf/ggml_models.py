"""A small Llama as a GGUF file whose matrices have GGML types in turn."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from support.gguf.ggml_weights import random_ggml, random_stored

from appliance.gguf.types import UNPACKED_TYPES
from appliance.kernels.weights.ggml_types import half_at

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, HEADS, LAYERS, VOCAB = 256, 4, 3, 112  # multiples of 16: no tile has room to spare


def write_llama(
    path: Path,
    types: Sequence[str],
    *,
    tied: bool = True,
    layers: int = LAYERS,
    architecture: str = "llama",
    biased: Sequence[str] = (),
    per_part: int = 0,
    scaled: bool = False,
    plain: bool = False,
) -> Path:
    """Write it; weights are as large as those of trained models, norms are 1.

    Args:
        biased: parts of a layer with a bias.
        per_part: tensors in a file, if gguf's writer splits the model; the first part is returned.
        scaled: each matrix has a factor, as NVFP4's have.
        plain: write what gguf's package makes of each matrix, in float32.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=per_part)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [chr(ord("!") + number) for number in range(VOCAB - 18)]
    writer.add_token_list([*letters, "ab", *(f"<{number}>" for number in range(17))])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    names = cycle(types)

    def matrix(name: str, rows: int, width: int) -> None:
        kind = next(names)
        names_so_far = [one for part in writer.tensors for one in part if one.endswith("weight")]
        blocks = blocks_of(kind, rows, width, seed=len(names_so_far) + len(biased) * layers)
        number = gguf.GGMLQuantizationType[kind]
        factor = np.full(1, 0.75 if "ffn" in name else 1.5, dtype=np.float32)
        if plain:
            values = gguf.quants.dequantize(blocks.reshape(rows, -1), number)
            writer.add_tensor(f"{name}.weight", values * factor if scaled else values)
            return
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=number)
        if scaled:
            writer.add_tensor(f"{name}.scale", factor)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    for layer in range(layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm")
        norm(block + "ffn_norm")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(block + part, HIDDEN, HIDDEN)
        for part in biased:
            writer.add_tensor(f"{block}{part}.bias", np.linspace(-1, 1, HIDDEN, dtype=np.float32))
        matrix(block + "ffn_gate", 2 * HIDDEN, HIDDEN)
        matrix(block + "ffn_up", 2 * HIDDEN, HIDDEN)
        matrix(block + "ffn_down", HIDDEN, 2 * HIDDEN)
    norm("output_norm")
    matrix("token_embd", VOCAB, HIDDEN)
    if not tied:
        matrix("output", VOCAB, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not per_part else min(path.parent.glob(f"{path.stem}-*-of-*"))


def blocks_of(kind: str, rows: int, width: int, seed: int) -> NDArray[np.uint8]:
    """(rows, blocks, bytes) uint8 with a spread of 1.5 / sqrt(width)."""
    if kind in ("F16", "Q4_0", "Q4_1", "Q8_0"):
        random = np.random.default_rng(seed)
        values = random.standard_normal((rows, width)).astype(np.float32) * 1.5 * width**-0.5
        stored: NDArray[np.uint8] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return stored
    if kind == "MXFP4":
        random = np.random.default_rng(seed)
        blocks = random.integers(0, 256, (rows, width // 32, 17), dtype=np.uint8)
        # Codes have a spread of 2.93, and the three scales one of 1.32 times the middle.
        middle = 127 + round(math.log2(1.5 * width**-0.5 / 2.93 / 1.32))
        blocks[..., 0] = random.integers(middle - 1, middle + 2, blocks.shape[:2])
        return blocks
    if kind == "NVFP4":
        random = np.random.default_rng(seed)
        blocks = random.integers(0, 256, (rows, width // 64, 36), dtype=np.uint8)
        middle = 7 + round(math.log2(1.5 * width**-0.5 / 2.93 / 1.5))
        blocks[..., :4] = 8 * middle + random.integers(0, 8, blocks[..., :4].shape)
        return blocks
    if kind in UNPACKED_TYPES:
        blocks = random_stored(kind, rows, width // 256, seed)
        values = gguf.quants.dequantize(blocks.reshape(rows, -1), gguf.GGMLQuantizationType[kind])
        factor = 1.5 * width**-0.5 / float(values.std())
        return random_stored(kind, rows, width // 256, seed, factor)
    weight = random_ggml(kind, rows, width, seed)
    factor = 1.5 * width**-0.5 / float(weight.dequantize().std())
    for start in weight.type.halves:
        half = (half_at(weight.blocks, start).float() * factor).half()
        weight.blocks[..., start : start + 2] = half.unsqueeze(-1).view(torch.uint8)
    return weight.blocks.numpy()
