"""Random weights of the trellis format."""

from __future__ import annotations

import torch

from appliance.kernels.weights.trellis import BLOCK, TrellisWeight
from appliance.quant.methods.trellis import packed


def random_trellis(bits: int, shape: tuple[int, int], seed: int = 0) -> TrellisWeight:
    """Make a weight (outputs, inputs) of any symbols."""
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = shape
    blocks = -(-outputs // BLOCK)
    symbols = torch.randint(0, 1 << bits, (inputs, blocks * BLOCK), generator=generator)
    scale = torch.rand(outputs, generator=generator) * 0.01
    return TrellisWeight(packed(symbols.to(torch.uint8), bits), scale)
