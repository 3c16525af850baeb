"""What the runner asks of a device: copies that nobody waits for, events, graphs.

`CudaDevice` is a GPU, whose work goes on beside the host's. `HostDevice` is the CPU, which does
everything at once; it replays a graph by calling what was captured, so that tests drive all of the
runner but the hardware anywhere.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Event(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Block until the device has come there."""
        ...


class Copy(Protocol):
    """A copy between the device and the host, beside the queue."""

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> float:
        """Block until it is over; returns the seconds that it took."""
        ...


class CaptureError(RuntimeError):
    """Work cannot be captured; enqueued as before it can."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue it again, on what the same tensors hold by then."""
        ...


class Device(Protocol):
    """One device with a queue of work: what is asked for happens later, in order.

    Attributes:
        is_asynchronous: whether its queue goes on while the host does something else. Then the next
            step is enqueued before the tokens of the last one are read, decode steps may become
            graphs, and the device's memory is measured rather than estimated.
    """

    @property
    def is_asynchronous(self) -> bool: ...  # noqa: D102
    @property
    def torch_device(self) -> torch.device:
        """Where tensors go."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory that the device reads and writes by itself: (num_bytes,) uint8."""
        ...

    def send(self, tensor: Tensor) -> Tensor:
        """Enqueue a copy of a small host tensor to the device; the source may change at once."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """Enqueue a copy to the host; its content is there after an event recorded later."""
        ...

    def fetch_aside(self, tensor: Tensor, rows: Sequence[Tensor]) -> Copy:
        """Copy the rows of a tensor to pinned tensors, after the queue and beside what comes later.

        Copies aside take place one after another. The tensor must last until this one is over.
        """
        ...

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        """Copy host tensors to the rows of a tensor, before whatever is enqueued later.

        It begins when all that is in the queue is done. Pinned rows may be written again by later
        copies aside, and by nobody else before it is over.
        """
        ...

    def follow(self, copy: Copy) -> None:
        """What is enqueued later begins when a copy is over."""
        ...

    def record(self) -> Event:
        """Mark this point of the queue."""
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """Capture what a function enqueues; it runs once before, so that all kernels are loaded.

        Raises:
            MemoryError: the device has no memory for it.
            CaptureError: it does what a graph cannot do.
        """
        ...

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        ...

    def memory_in_use(self) -> int:
        """Bytes kept on the device since it was opened, unused reserves included."""
        ...

    def overhead(self) -> int:
        """Bytes taken on the device since it was opened, beside `memory_in_use`.

        The code of kernels, what libraries and graphs keep, and other processes.
        """
        ...

    def begin_peak(self) -> int:
        """Give unused reserves back and begin to watch the peak; returns the bytes in use now."""
        ...

    def peak(self) -> int:
        """Most bytes in use since `begin_peak`."""
        ...


class HostDevice:
    """The CPU as a device whose queue is always empty."""

    is_asynchronous = False
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

    def fetch_aside(self, tensor: Tensor, rows: Sequence[Tensor]) -> Copy:
        """See `Device`."""
        begin = time.perf_counter()
        for row, content in zip(rows, tensor, strict=True):
            row.copy_(content)
        return _PastCopy(time.perf_counter() - begin)

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        """See `Device`."""
        begin = time.perf_counter()
        for row, place in zip(rows, tensor, strict=True):
            place.copy_(row)
        return _PastCopy(time.perf_counter() - begin)

    def follow(self, copy: Copy) -> None:
        """See `Device`."""

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

    def overhead(self) -> int:
        """See `Device`."""
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
    is_over = True

    def wait(self) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class _Repeated:
    function: Callable[[], None]

    def replay(self) -> None:
        self.function()
