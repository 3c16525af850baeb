"""Models in the CPU library, with each instruction set that this processor has."""

from __future__ import annotations

from pathlib import Path

import torch

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.cpu.structs import Isa
from appliance.model.native import NativeDecoder
from appliance.model.native_loader import load_native
from appliance.model.source import open_model

LIBRARY = load_library()
ISAS = [isa for isa in Isa if LIBRARY.ap_isa_supported(isa)]


def native(folder: Path, threads: int = 1) -> NativeDecoder:
    """Load a model with float32 for what is not packed."""
    return load_native(open_model(folder), NativeEngine(LIBRARY, threads), torch.float32)
