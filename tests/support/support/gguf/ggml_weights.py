"""Weights in the blocks of GGML types: any codes, scales as models have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from appliance.gguf.types import TENSOR_TYPES, UNPACKED_TYPES
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}
_HALVES = {name: kind.halves for name, kind in GGML_TYPES.items()}
# The places of float16 scales in files' blocks, where held blocks differ.
_STORED_HALVES = {**dict.fromkeys(UNPACKED_TYPES, (0,)), "TQ1_0": (52,), "TQ2_0": (64,)}


def random_stored(
    type_name: str, rows: int, blocks: int, seed: int = 0, factor: float = 1.0
) -> NDArray[np.uint8]:
    """Blocks as a file stores them, (rows, blocks, bytes): any codes, scales as models have."""
    random = np.random.default_rng(seed)
    shape = (rows, blocks)
    data = random.integers(0, 256, (*shape, _KINDS[type_name].block_bytes), dtype=np.uint8)
    for start in stored_halves(type_name):
        scale = random.uniform(1e-4, 4e-4, shape) * random.choice((-1, 1), shape) * factor
        put_scale(type_name, data, start, scale.astype(np.float16))
    return data


def put_scale(
    type_name: str, blocks: NDArray[np.uint8], start: int, scale: NDArray[np.float16]
) -> None:
    """Store a float16 for each block; of IQ1_M in the uppermost nibbles of its last four halves."""
    if type_name != "IQ1_M":
        blocks[..., start : start + 2] = scale[..., None].view(np.uint8)
        return
    nibbles = scale[..., None].view("<u2") >> np.arange(0, 16, 4, dtype=np.uint16) & 15
    odd = slice(49, 56, 2)
    blocks[..., odd] = blocks[..., odd] & 15 | nibbles.astype(np.uint8) << 4


def stored_halves(type_name: str) -> tuple[int, ...]:
    """Places of the float16 scales of a block as files store it."""
    return (_HALVES | _STORED_HALVES)[type_name]


def random_ggml(type_name: str, out_features: int, in_features: int, seed: int = 0) -> GgmlWeight:
    """Random bytes, of which the float16 scales are small and of both signs."""
    kind = GGML_TYPES[type_name]
    random = np.random.default_rng(seed)
    shape = (out_features, in_features // kind.block_size)
    blocks = random.integers(0, 256, (*shape, kind.block_bytes), dtype=np.uint8)
    for start in kind.halves:
        scale = random.uniform(1e-4, 4e-4, shape) * random.choice((-1, 1), shape)
        blocks[..., start : start + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return GgmlWeight(type_name, torch.from_numpy(blocks))
