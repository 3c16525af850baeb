"""Choose our kernels on a GPU; elsewhere the torch references, as the interpreter is slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.backend import select_backend

if TYPE_CHECKING:
    from appliance.kernels.operations import Backend
    from bench.gpu.timing import Bench


def our_backend(bench: Bench) -> Backend:
    return select_backend(bench.device, "auto" if bench.is_gpu else "reference")
