"""The runner's interface to a device: asynchronous copies, events, graphs.

`CudaDevice` is an asynchronous GPU; `HostDevice` and `NativeDevice` are the synchronous CPU.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch
    from numpy.typing import NDArray
    from torch import Tensor


class Event(Protocol):
    """A point in the device's work."""

    @property
    def is_over(self) -> bool:
        """True if `wait` would return immediately."""
        ...

    def wait(self) -> None:
        """Block until the device has reached it."""
        ...


class Copy(Protocol):
    """A copy between device and host, concurrent with the queue."""

    @property
    def is_over(self) -> bool:
        """True if `wait` would return immediately."""
        ...

    def wait(self) -> float:
        """Block until it has ended; return its duration in seconds."""
        ...


class CaptureError(RuntimeError):
    """The work cannot be captured, but can still be enqueued."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Enqueue the work again, on the current content of the same tensors."""
        ...


class Device(Protocol):
    """A device with a queue of work, done later and in order.

    Attributes:
        is_asynchronous: its queue runs while the host does something else. Then the runner enqueues
            the next step before it reads the last one's tokens, decode steps may become graphs, and
            memory is measured instead of estimated.
    """

    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def torch_device(self) -> torch.device: ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device can read and write: (num_bytes,) uint8."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor: ...

    def view(self, array: NDArray[Any] | Tensor) -> Tensor:
        """Return host memory as the device's kind of array."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Return a context for enqueued work.

        Raises:
            MemoryError: the device has too little memory.
        """
        ...

    def send(self, array: NDArray[Any]) -> Tensor:
        """Enqueue a copy of a small host array, whose source may change at once."""
        ...

    def fetch(self, tensor: Tensor) -> Tensor:
        """Enqueue a copy to the host; it is complete after an event recorded later."""
        ...

    def fetch_aside(self, tensor: Tensor, rows: Sequence[Tensor]) -> Copy:
        """Copy a tensor's rows to pinned tensors, after the queue and beside later work.

        Such copies run in order. Keep the tensor until this one has ended.
        """
        ...

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        """Copy host tensors to a tensor's rows, before anything enqueued later.

        Begins when the queue so far is done. Until it has ended, only later such copies may write
        to pinned rows.
        """
        ...

    def follow(self, copy: Copy) -> None: ...

    def record(self) -> Event:
        """Mark this point of the queue."""
        ...

    def capture(self, function: Callable[[], None]) -> Graph:
        """Capture the work that a function enqueues, after one run that loads all kernels.

        Raises:
            MemoryError: the device has too little memory.
            CaptureError: the function does something that a graph cannot.
        """
        ...

    def cut(self, call: Callable[[], None]) -> None:
        """Run a call of the host; in a capture, end the graph's part before it and begin another.

        A replay repeats the call between the parts.
        """
        ...

    def synchronize(self) -> None: ...

    def memory_in_use(self) -> int:
        """Return the bytes kept on the device since opening, unused reserves included."""
        ...

    def overhead(self) -> int:
        """Return the bytes taken on the device since opening, beyond `memory_in_use`.

        These are kernel code, libraries' workspaces, graphs, and other processes.
        """
        ...

    def begin_peak(self) -> int:
        """Release unused reserves and start to measure the peak; return the bytes in use."""
        ...

    def peak(self) -> int:
        """Return the peak of bytes in use since `begin_peak`."""
        ...


@contextmanager
def in_torch() -> Iterator[None]:
    """Run torch without gradients; turn its out-of-memory error into MemoryError."""
    import torch

    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"the device has no memory for this step: {error}") from error
