"""Our kernels on a GPU; elsewhere their torch references, which are quicker than an interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.backend import select_backend

if TYPE_CHECKING:
    from appliance.kernels.backend import Backend
    from bench.gpu.timing import Bench


def our_backend(bench: Bench) -> Backend:
    """The operations that a GPU runs, or their definitions."""
    return select_backend(bench.device, "auto" if bench.is_gpu else "reference")
