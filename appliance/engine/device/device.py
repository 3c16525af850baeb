"""What the asynchronous runner asks of a device: copies that nobody waits for, events, graphs.

`CudaDevice` is the real one. `HostDevice` does everything at once on the CPU, and replays a graph
by calling what was captured, so that all of the runner but the hardware can be tested anywhere.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block until the device has come there."""
        ...


class Copy(Protocol):
    """A copy between the device and the host, beside the queue."""

    def wait(self) -> float:
        """Block until it is over; returns the seconds that it took."""
        ...


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it again, on what the same tensors hold by then."""
        ...


class Device(Protocol):
    """One device with a queue of work: what is asked for happens later, in order."""

    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that the device reads by itself: (num_bytes,) uint8."""
        ...

    def send(self, tensor: Tensor) -> Tensor:
        """Enqueue a copy of a small host tensor to the device; the source may change at once."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """Enqueue a copy to the host; its content is there after an event recorded later."""
        ...

    def fetch_aside(self, tensor: Tensor, host: Tensor) -> Copy:
        """Copy to pinned host memory, after what is in the queue and beside what comes later."""
        ...

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        """Copy host tensors to the rows of a tensor, before whatever is enqueued later."""
        ...

    def record(self) -> Event:
        """Mark this point of the queue."""
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """Capture what a function enqueues; it runs once before, so that all kernels are loaded.

        Raises:
            MemoryError: the device has no memory for it.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        ...

    def memory_in_use(self) -> int:
        """Bytes that this process keeps on the device, unused reserves included."""
        ...

    def begin_peak(self) -> int:
        """Give unused reserves back and begin to watch the peak; returns the bytes in use now."""
        ...

    def peak(self) -> int:
        """Most bytes in use since `begin_peak`."""
        ...


class CudaDevice:
    """One NVIDIA GPU, through torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None

    def pinned(self, num_bytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, tensor: Tensor) -> Tensor:
        """See `Device`; torch keeps pinned memory until the copy is over."""
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def fetch_aside(self, tensor: Tensor, host: Tensor) -> Copy:
        """See `Device`."""
        side = self._side_stream()
        with torch.cuda.stream(side):
            begin = _timing_event()
            host.copy_(tensor, non_blocking=True)
            end = _timing_event()
        tensor.record_stream(side)
        return _CudaCopy(begin, end)

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        """See `Device`."""
        side = self._side_stream()
        with torch.cuda.stream(side):
            begin = _timing_event()
            for row, place in zip(rows, tensor, strict=True):
                place.copy_(row, non_blocking=True)
            end = _timing_event()
        tensor.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        return _CudaCopy(begin, end)

    def _side_stream(self) -> torch.cuda.Stream:
        """A stream for copies, behind all that was enqueued so far."""
        if self._side is None:
            self._side = torch.cuda.Stream()
        self._side.wait_stream(torch.cuda.current_stream())
        return self._side

    def record(self) -> Event:
        """See `Device`."""
        event = torch.cuda.Event()
        event.record()
        return _CudaEvent(event)

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Device`; all graphs share one pool of memory."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                function()
            current.wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                function()
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        return graph

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self.torch_device)

    def memory_in_use(self) -> int:
        """See `Device`."""
        return torch.cuda.memory_reserved(self.torch_device)

    def begin_peak(self) -> int:
        """See `Device`."""
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return self.memory_in_use()

    def peak(self) -> int:
        """See `Device`."""
        self.synchronize()
        return torch.cuda.max_memory_reserved(self.torch_device)


@dataclass(frozen=True, slots=True)
class _CudaEvent:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()


def _timing_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class _CudaCopy:
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self) -> float:
        self.end.synchronize()
        return float(self.begin.elapsed_time(self.end)) / 1000


class HostDevice:
    """The CPU as a device whose queue is always empty."""

    torch_device = torch.device("cpu")

    def pinned(self, num_bytes: int) -> Tensor:
        """See `Device`."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return tensor.clone()

    def fetch(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return tensor.clone()

    def fetch_aside(self, tensor: Tensor, host: Tensor) -> Copy:
        """See `Device`."""
        begin = time.perf_counter()
        host.copy_(tensor)
        return _PastCopy(time.perf_counter() - begin)

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        """See `Device`."""
        begin = time.perf_counter()
        for row, place in zip(rows, tensor, strict=True):
            place.copy_(row)
        return _PastCopy(time.perf_counter() - begin)

    def record(self) -> Event:
        """See `Device`."""
        return _Past()

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Device`."""
        function()
        return _Repeated(function)

    def synchronize(self) -> None:
        """See `Device`."""

    def memory_in_use(self) -> int:
        """See `Device`; nobody counts here."""
        return 0

    def begin_peak(self) -> int:
        """See `Device`."""
        return 0

    def peak(self) -> int:
        """See `Device`."""
        return 0


@dataclass(frozen=True, slots=True)
class _Past:
    def wait(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class _PastCopy:
    seconds: float

    def wait(self) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class _Repeated:
    function: Callable[[], None]

    def replay(self) -> None:
        self.function()
