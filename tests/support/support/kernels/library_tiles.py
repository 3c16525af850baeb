"""Weights as the CPU library lays them out, with the memory that they live in."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from support.models.native_models import LIBRARY

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.weight_bytes import memory_of
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.library_tiles.tiles import LinearTiles


def laid_out(
    weight: Any, bias: torch.Tensor | None = None, dtype: Any = torch.float32
) -> tuple[LinearTiles, Arena]:
    """A weight's tiles; they are gone with the arena."""
    arena = Arena()
    struct = WeightPacker(NativeEngine(LIBRARY, 1), arena, dtype).linear(weight, bias)
    parts = {
        name: torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        for name, (address, size) in memory_of(struct).items()
    }
    return LinearTiles.of(struct, parts), arena
