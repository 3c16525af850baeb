"""Experts in host memory, multiplied there by the CPU library for another device.

Rows, choices and router weights cross the bus, and sums come back; the device executes work
enqueued after `begin` in the meantime. With many rows, experts are streamed to the device instead.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import check
from appliance.kernels.cpu.structs import (
    ExpertsStruct,
    GatingStruct,
    LinearStruct,
    RoutedStruct,
    RouterStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.expert_stream import ExpertStream
from appliance.model.native_layout import gating_struct, lay_out_each

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import Tensor

    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.kernels.operations import Backend
    from appliance.model.expert_stream import StreamedExperts
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
        self.calls = HostCalls()
        self._packer = WeightPacker(engine, self.arena, dtype)
        self._device = device
        self._dtype = dtype
        self._stream: ExpertStream | None = None
        self._buffers: dict[tuple[Hashable, ...], Tensor] = {}

    def stream(self, backend: Backend, *, rows: int, piece_bytes: int) -> None:
        """Stream the experts laid out from now on; see `ExpertStream`."""
        self._stream = ExpertStream(
            self.arena, backend, self._device, self._dtype, rows=rows, piece_bytes=piece_bytes
        )

    def lay_out(
        self,
        expert: Callable[[int], MLPWeights],
        spec: ExpertsSpec,
        *,
        may_stream: bool = True,
    ) -> HostExperts:
        """Lay out the experts of one layer, reading one at a time."""
        before = self.arena.nbytes
        gate, up, down = lay_out_each(self._packer, expert, spec)
        router = RouterStruct(num_experts=spec.router.num_experts, top_k=spec.router.top_k)
        here = spec.experts
        struct = ExpertsStruct(
            router=router,
            first_expert=here.start,
            num_here=len(here),
            weighs_inputs=spec.weighs_inputs,
            gate=gate,
            up=up,
            down=down,
        )
        nbytes = self.arena.nbytes - before
        streamed = None
        if self._stream is not None and may_stream:
            arrays = [_structs(at, spec.router.num_experts) for at in (gate, up, down) if at]
            streamed = self._stream.add(list(zip(*arrays, strict=True)), spec)
        return HostExperts(self, struct, gating_struct(spec.activation), nbytes, streamed)

    def finish(self) -> None:
        """Take the memory for streams, once all layers are laid out."""
        if self._stream is not None:
            self._stream.allocate()

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory that the device can access; it grows with the rows."""
        rows, *row = shape
        key = (name, *row, dtype)
        kept = self._buffers.get(key)
        if kept is None or len(kept) < rows:
            with torch.inference_mode(mode=False):
                kept = torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
            self._buffers[key] = kept
        return kept[:rows]


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The experts of one layer, like `RoutedMLPs` but in two steps.

    Attributes:
        nbytes: host memory of weights and biases.
        streamed: the same experts on the device, for steps with many rows; None for none.
    """

    side: HostSide
    experts: ExpertsStruct
    gating: GatingStruct
    nbytes: int
    streamed: StreamedExperts | None = None

    def begin(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Send rows to the host, or take experts to the rows.

        Args:
            hidden: (num_tokens, hidden_size).
            ids: (num_tokens, top_k) int64.
            weights: (num_tokens, top_k) float32.

        Returns:
            A function that waits for the rows, multiplies, and returns the weighted sums on the
            device, (num_tokens, hidden_size) float32. Call it before the next `begin`.
        """
        rows, device = len(hidden), hidden.device
        if self.streamed is not None and rows >= self.streamed.stream.rows:
            return partial(self.streamed, hidden, ids, weights)
        sent = [
            self._sent(name, tensor)
            for name, tensor in (("hidden", hidden), ("ids", ids), ("weights", weights))
        ]
        out = self.side.buffer("out", (rows, hidden.shape[1]), torch.float32)
        arrived = torch.cuda.Event() if device.type == "cuda" else None
        if arrived is not None:
            self.side.calls.run(lambda: arrived.record(torch.cuda.current_stream(device)))

        def multiply() -> None:
            if arrived is not None:
                arrived.synchronize()
            of_rows, of_ids, of_weights = sent
            self.multiply(of_rows.float(), of_ids, of_weights, out)

        def finish() -> Tensor:
            self.side.calls.run(multiply)
            return torch.empty_like(out, device=device).copy_(out, non_blocking=True)

        return finish

    def _sent(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self.side.buffer(name, tuple(tensor.shape), tensor.dtype)
        return buffer.copy_(tensor, non_blocking=True)

    def multiply(self, hidden: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        """Write the weighted sums of rows on the host; shapes as in `begin`."""
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


class HostCalls:
    """The calls that a step makes to the host, between pieces of work for the device.

    A call takes and leaves tensors at fixed places, so a graph's replay can repeat it.
    """

    def __init__(self) -> None:
        self._cut: Callable[[Callable[[], None]], None] | None = None

    def run(self, call: Callable[[], None]) -> None:
        """Run a call now, or hand it to whoever cuts."""
        if self._cut is None:
            call()
        else:
            self._cut(call)

    @contextmanager
    def cut_by(self, cut: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Hand calls to `cut` instead of running them."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None


def _structs(address: int, count: int) -> list[LinearStruct]:
    return list((LinearStruct * count).from_address(address))
