"""Weights in the blocks of GGML types: any codes, scales as models have them."""

from __future__ import annotations

import numpy as np
import torch

from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES


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
