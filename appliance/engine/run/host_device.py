"""The CPU as a device with an always empty queue; replaying a graph calls the function.

So tests drive the whole runner without a GPU.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.engine.run.device import in_torch
from appliance.kernels import arrays
from appliance.kernels.cpu.arena import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.run.device import Copy, Event, Graph


class HostDevice:
    """The CPU as a device, for torch's executions."""

    is_asynchronous = False

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    def pinned(self, num_bytes: int) -> Tensor:
        return self.zeros((num_bytes,), "uint8")

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def view(self, array: NDArray[Any] | Tensor) -> Tensor:
        import torch

        return array if isinstance(array, torch.Tensor) else arrays.of_numpy(array).tensor()

    def running(self) -> AbstractContextManager[None]:
        return in_torch()

    def send(self, array: NDArray[Any]) -> Tensor:
        return self.view(array).clone()

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def fetch_aside(self, tensor: Tensor, rows: Sequence[Tensor]) -> Copy:
        begin = time.perf_counter()
        for row, content in zip(rows, tensor, strict=True):
            row.copy_(content)
        return _PastCopy(time.perf_counter() - begin)

    def send_aside(self, rows: Sequence[Tensor], tensor: Tensor) -> Copy:
        begin = time.perf_counter()
        for row, place in zip(rows, tensor, strict=True):
            place.copy_(row)
        return _PastCopy(time.perf_counter() - begin)

    def follow(self, copy: Copy) -> None: ...

    def record(self) -> Event:
        return _Past()

    def capture(self, function: Callable[[], None]) -> Graph:
        function()
        return _Repeated(function)

    def cut(self, call: Callable[[], None]) -> None:
        call()

    def synchronize(self) -> None: ...

    def memory_in_use(self) -> int:
        """See `Device`; not measured."""
        return 0

    def overhead(self) -> int:
        return 0

    def begin_peak(self) -> int:
        return 0

    def peak(self) -> int:
        return 0


class NativeDevice(HostDevice):
    """The CPU for the CPU library: its arrays need no torch."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        # A heap that has been trimmed would write its zeros; these pages take memory once written.
        size = math.prod(shape) * arrays.numpy_dtype(dtype).itemsize
        memory = np.frombuffer(Mapping.of(max(size, 1)).memory, np.uint8, size)
        return arrays.of_numpy(memory.view(arrays.numpy_dtype(dtype)).reshape(shape))  # type: ignore[no-any-return]

    def view(self, array: NDArray[Any] | Tensor) -> Tensor:
        return arrays.of_numpy(array)  # type: ignore[no-any-return]

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class _Past:
    is_over = True

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
