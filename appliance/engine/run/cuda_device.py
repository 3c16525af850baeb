"""A GPU as the runner's device: torch's pinned memory, streams, events and graphs."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from appliance.engine.run.device import CaptureError, in_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.run.device import Copy, Event, Graph


logger = logging.getLogger(__name__)


class CudaDevice:
    """One NVIDIA GPU, used through torch's current stream."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._pool: Any = None
        self._copies: torch.cuda.Stream | None = None
        self._captures: torch.cuda.Stream | None = None
        self._open: OpenCapture | None = None
        torch.cuda.empty_cache()  # also return unused reserves to the driver
        self._bytes_before = torch.cuda.memory_reserved(device)  # of other users in this process
        self._other_bytes = self._beside_torch()

    @torch.inference_mode(mode=False)
    def pinned(self, num_bytes: int) -> Tensor:
        """See `Device`; falls back to pageable memory, for which copies wait.

        No inference tensor: those are read-only outside inference mode.
        """
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning("the GPU gets no host memory of its own, so it waits more: %s", error)
            return torch.empty(num_bytes, dtype=torch.uint8)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.torch_device)

    def view(self, array: NDArray[Any] | Tensor) -> Tensor:
        return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)

    def running(self) -> AbstractContextManager[None]:
        return in_torch()

    def send(self, array: NDArray[Any]) -> Tensor:
        """See `Device`; torch keeps pinned memory until the copy has ended."""
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def fetch_aside(self, tensor: Tensor, rows: Sequence[Tensor]) -> Copy:
        return self._copy_aside(zip(rows, tensor, strict=True))

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        copy = self._copy_aside(zip(tensor, rows, strict=True))
        self.follow(copy)
        return copy

    def _copy_aside(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> _CudaCopy:
        """Copy to the first of each pair, after everything enqueued so far."""
        if self._copies is None:
            self._copies = torch.cuda.Stream()
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            begin = _timing_event()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return _CudaCopy(begin, _timing_event())

    def follow(self, copy: Copy) -> None:
        assert isinstance(copy, _CudaCopy)
        torch.cuda.current_stream().wait_event(copy.end)

    def record(self) -> Event:
        # Waits without a busy loop: the next step is enqueued already, so the GPU does not notice a
        # host that wakes up a few microseconds later.
        event = torch.cuda.Event(blocking=True)
        event.record()
        return _CudaEvent(event)

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Device`; all graphs share one memory pool.

        Runs the function on the capture's stream first, because libraries keep a workspace per
        stream: one made during a capture would belong to the graphs.
        """
        if self._captures is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._captures = torch.cuda.Stream()
        current, side = torch.cuda.current_stream(), self._captures
        with torch.cuda.stream(side):  # `graph` does not leave its stream if the capture fails
            side.wait_stream(current)
            try:
                function()
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            finally:
                current.wait_stream(side)
            try:
                with OpenCapture(self._pool, side) as self._open:
                    function()
                return self._open.whole
            except RuntimeError as error:
                self._give_up_capture()
                if _is_out_of_memory(error):
                    raise MemoryError(str(error)) from error
                raise CaptureError(str(error.__context__ or error)) from error
            finally:
                self._open = None

    def cut(self, call: Callable[[], None]) -> None:
        if self._open is None:
            call()
        else:
            self._open.cut(call)

    def _give_up_capture(self) -> None:
        """Reset the allocator after a failed capture; raise if the GPU does not work."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory_in_use(self) -> int:
        return torch.cuda.memory_reserved(self.torch_device) - self._bytes_before

    def overhead(self) -> int:
        return max(0, self._beside_torch() - self._other_bytes)

    def _beside_torch(self) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free - torch.cuda.memory_reserved(self.torch_device)

    def begin_peak(self) -> int:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return self.memory_in_use()

    def peak(self) -> int:
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch_device) - self._bytes_before


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: torch.cuda.Event

    @property
    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Recognize an out-of-memory error, even from the driver or behind a failed end of capture."""
    if error is None:
        return False
    known = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)
    return known or _is_out_of_memory(error.__context__)


def _timing_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class _CudaCopy:
    begin: torch.cuda.Event
    end: torch.cuda.Event

    @property
    def is_over(self) -> bool:
        return bool(self.end.query())

    def wait(self) -> float:
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1000


class OpenCapture:
    """A capture under way: one graph, or graphs between calls of the host."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self._stream = stream
        self._parts: list[Graph] = []
        self._part = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._part.__exit__(*error)

    @property
    def whole(self) -> Graph:
        return self._parts[0] if len(self._parts) == 1 else _Parts(tuple(self._parts))

    def cut(self, call: Callable[[], None]) -> None:
        self._part.close()
        self._parts.append(_HostCall(call))
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._part.enter_context(
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            )
        )
        self._parts.append(graph)


@dataclass(frozen=True, slots=True)
class _HostCall:
    """A part of captured work that the host does itself."""

    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Parts:
    parts: tuple[Graph, ...]

    def replay(self) -> None:
        for part in self.parts:
            part.replay()
