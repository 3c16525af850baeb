"""Makes EXL3 folders of dense ones: each symbol is the nearest where it stands, in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from appliance.model_files.checkpoint import SafetensorsFolder, write_safetensors
from appliance.quant.formats.exl3 import BLOCK, TILE, codebook, hadamard

Array = NDArray[Any]


def exl3_parts(module: str, weight: Tensor, bits: int, kind: str = "") -> dict[str, Tensor]:
    """Return the tensors of a weight (outputs, inputs), padded to blocks of 128."""
    rows, columns = (-(-size // BLOCK) * BLOCK for size in weight.shape)
    padded = np.zeros((columns, rows), dtype=np.float32)
    padded[: weight.shape[1], : weight.shape[0]] = weight.float().numpy().T
    random = np.random.default_rng(rows * columns)
    inputs, outputs = (random.choice([-1.0, 1.0], size) for size in (columns, rows))
    multiplier = {"": 89226354, ".mcg": 0xCBAC1FED, ".mul1": 0x83DCD12D}[kind]
    table = codebook(kind, multiplier)
    matrix = hadamard()
    turned = padded * inputs[:, None] * outputs
    turned = (matrix @ turned.reshape(-1, BLOCK, rows)).reshape(columns, -1, BLOCK) @ matrix
    turned = turned.reshape(columns, rows)
    scale = np.sqrt((turned**2).mean() / (table**2).mean())
    tiles = turned.reshape(columns // TILE, TILE, rows // TILE, TILE).transpose(0, 2, 1, 3)
    targets = tiles.reshape(*tiles.shape[:2], TILE * TILE)[..., tile_order()] / scale
    symbols = nearest_symbols(targets.reshape(-1, TILE * TILE), bits, table)
    words = packed(symbols, bits).reshape(*tiles.shape[:2], -1)
    parts = {
        ".trellis": torch.from_numpy(words.view(np.int16)),
        ".suh": torch.from_numpy(inputs).half(),
        ".svh": torch.from_numpy(outputs * scale).half(),
    }
    if kind:
        stored = np.array(multiplier, dtype=np.uint32).view(np.int32)
        parts[kind] = torch.from_numpy(stored)
    return {module + part: tensor for part, tensor in parts.items()}


def tile_order() -> Array:
    """Return the row-major place in a tile (inputs, outputs) of each symbol's value."""
    lane, item = np.divmod(np.arange(TILE * TILE), 8)
    row = lane % 4 * 2 + item % 2 + item // 2 % 2 * 8
    order: Array = row * TILE + lane // 4 + item // 4 * 8
    return order


def nearest_symbols(targets: Array, bits: int, table: Array) -> Array:
    """Choose symbols (tiles, 256) of closed sequences for values of that shape."""
    fixed = -(-(16 - bits) // bits)  # symbols before the first that its state has
    count, length = targets.shape
    found = np.zeros((count, length), dtype=np.int64)
    choices = np.arange(1 << bits)
    for turn in range(2):  # the second begins with the last symbols of the first
        state = np.zeros(count, dtype=np.int64)
        for symbol in found[:, length - fixed :].T:
            state = (state << bits | symbol) & 0xFFFF
        for place in range(length - fixed if turn else length):
            each = (state[:, None] << bits | choices) & 0xFFFF
            errors = (table[each] - targets[:, place, None]) ** 2
            after = each
            if turn and place == length - fixed - 1:  # those that follow are given
                for later in range(length - fixed, length):
                    after = (after << bits | found[:, later, None]) & 0xFFFF
                    errors = errors + (table[after] - targets[:, later, None]) ** 2
            best = errors.argmin(1)
            found[:, place] = best
            state = each[np.arange(count), best]
    return found


def packed(symbols: Array, bits: int) -> Array:
    """Pack symbols (tiles, 256), the first in the highest bits, and swap the words of pairs."""
    places = np.arange(bits - 1, -1, -1)
    stream = (symbols[..., None] >> places & 1).reshape(len(symbols), -1).astype(np.uint8)
    words = np.packbits(stream, axis=-1).view(">u2").astype(np.uint16)
    return words.reshape(len(symbols), -1, 2)[..., ::-1].reshape(len(symbols), -1)


def write_exl3(source: Path, out: Path, bits: int, kind: str = ".mcg") -> Path:
    """Write a model with all its linears, and the head, in EXL3."""
    folder = SafetensorsFolder(source)
    config = folder.config
    names = folder.tensor_names()
    tensors = {name: folder.load(name) for name in names}
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    coded = [name for name in tensors if name.endswith(("proj.weight", "lm_head.weight"))]
    found = {name: tensors[name].half() for name in tensors if name not in coded}
    for name in coded:
        found |= exl3_parts(name.removesuffix(".weight"), tensors[name], bits, kind)
    out.mkdir()
    write_safetensors(out / "model.safetensors", found)
    settings = {
        "quant_method": "exl3", "version": "1.4.1", "bits": bits + 0.5, "head_bits": bits,
        "calibration": {"rows": 250, "cols": 2048}, "out_scales": "auto", "codebook": kind[1:],
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return out
