"""Starts the CPU library's threads as the settings say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.kernels.cpu.structs import Isa


def native_engine(config: EngineConfig, threads: int) -> tuple[NativeEngine, Isa]:
    """Start threads, and use the instruction set that the settings ask for.

    Raises:
        LibraryError: the library cannot be used, or has no such instruction set.
        MemoryError: the threads could not be started.
    """
    library = load_library()
    isa = select_isa(library, config.cpu_isa)
    return NativeEngine(library, threads), isa
