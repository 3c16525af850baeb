"""Our kernels: on a GPU as they are served, elsewhere in Triton's interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.backend import select_backend, triton_backend

if TYPE_CHECKING:
    from gpu_timing import Bench

    from appliance.kernels.backend import Backend


def our_backend(bench: Bench) -> Backend:
    """The operations that a GPU runs."""
    return select_backend(bench.device) if bench.is_gpu else triton_backend()
