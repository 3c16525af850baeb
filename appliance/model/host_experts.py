"""Experts in host memory, multiplied there by the CPU library for another device.

Rows, choices and router weights cross the bus, and sums come back; expert weights never do. The
device executes work enqueued after `begin` in the meantime.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.structs import ExpertsStruct, GatingStruct, RoutedStruct, RouterStruct
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.native_mlp import gating_struct, lay_out_each

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.layer_weights import MLPWeights
    from appliance.model.spec import ExpertsSpec


class HostSide:
    """The CPU library's threads, the weights it holds, and the transfer buffers.

    All layers share the buffers: the device takes a layer's sums before it writes the next layer's
    rows, and the host waits for those before it reads or writes a buffer.

    Args:
        dtype: of activations and of unpacked weights.
    """

    def __init__(self, engine: NativeEngine, device: torch.device, dtype: torch.dtype) -> None:
        self.engine = engine
        self.arena = Arena()
        self._packer = WeightPacker(engine, self.arena, dtype)
        self._is_pinned = device.type == "cuda"
        self._buffers: dict[tuple[Hashable, ...], Tensor] = {}

    def lay_out(self, expert: Callable[[int], MLPWeights], spec: ExpertsSpec) -> HostExperts:
        """Lay out the experts of one layer, reading one at a time."""
        before = self.arena.nbytes
        gate, up, down = lay_out_each(self._packer, expert, spec)
        router = RouterStruct(num_experts=spec.router.num_experts, top_k=spec.router.top_k)
        struct = ExpertsStruct(router=router, gate=gate, up=up, down=down)
        nbytes = self.arena.nbytes - before
        return HostExperts(self, struct, gating_struct(spec.activation), nbytes)

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that the device can access; it grows with the rows."""
        rows, *row = shape
        key = (name, *row, dtype)
        kept = self._buffers.get(key)
        if kept is None or len(kept) < rows:
            with torch.inference_mode(mode=False):
                kept = torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned)
            self._buffers[key] = kept
        return kept[:rows]


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The experts of one layer, like `RoutedMLPs` but in two steps.

    Attributes:
        nbytes: host memory of weights and biases.
    """

    side: HostSide
    experts: ExpertsStruct
    gating: GatingStruct
    nbytes: int

    def begin(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Send rows to the host.

        Args:
            hidden: (num_tokens, hidden_size).
            ids: (num_tokens, top_k) int64.
            weights: (num_tokens, top_k) float32.

        Returns:
            A function that waits for the rows, multiplies, and returns the weighted sums on the
            device, (num_tokens, hidden_size) float32. Call it before the next `begin`.
        """
        rows, device = len(hidden), hidden.device
        sent = [
            self._sent(name, tensor)
            for name, tensor in (("hidden", hidden), ("ids", ids), ("weights", weights))
        ]
        arrived = torch.cuda.Event() if device.type == "cuda" else None
        if arrived is not None:
            arrived.record(torch.cuda.current_stream(device))

        def finish() -> Tensor:
            if arrived is not None:
                arrived.synchronize()
            of_rows, of_ids, of_weights = sent
            out = self.side.buffer("out", (rows, hidden.shape[1]), torch.float32)
            self._multiply(of_rows.float(), of_ids, of_weights, out)
            return torch.empty_like(out, device=device).copy_(out, non_blocking=True)

        return finish

    def _sent(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.side.buffer(name, tuple(tensor.shape), tensor.dtype)
        return buffer.copy_(tensor, non_blocking=True)

    def _multiply(self, hidden: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        routed = RoutedStruct(
            rows=len(hidden),
            hidden=hidden.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
        )
        engine = self.side.engine
        check(
            engine.library.ap_run_experts(
                engine.handle,
                ctypes.byref(self.experts),
                ctypes.byref(self.gating),
                ctypes.byref(routed),
            )
        )
