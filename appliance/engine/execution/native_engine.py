"""Starts the CPU library's threads according to the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.kernels.cpu.structs import Isa


def native_engine(config: EngineConfig, threads: int) -> tuple[NativeEngine, Isa]:
    """Start threads and select the configured instruction set.

    Raises:
        LibraryError: the library is unusable, or lacks the instruction set.
        MemoryError: the threads did not start.
    """
    library = load_library()
    isa = select_isa(library, config.cpu_isa)
    return NativeEngine(library, threads), isa
