"""Links between two devices of torch that one process sees, and the devices' own bandwidth."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from appliance.engine.links.link import LinkPath, LinkTimeoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

COPY_BYTES = 256 << 20  # more than any GPU's cache
PASSES = 3


class DeviceLink:
    """Copies from one device to another and back.

    Args:
        first: sends the data and gets them back.
        second: receives them and sends them back.
        path: direct, or through pinned memory of the host.
    """

    def __init__(self, first: torch.device, second: torch.device, path: LinkPath) -> None:
        self.path = path
        self._devices = first, second

    def echo(self, data: NDArray[Any], rounds: int, limit: float) -> tuple[NDArray[Any], float]:
        """Send data there and back; see `Link`.

        Every copy goes into memory of zeros, so that one that does nothing is seen. A copy that
        never ends is for another process to notice.

        Raises:
            LinkTimeoutError: it took longer than the limit.
        """
        first, second = self._devices
        here = torch.from_numpy(data).to(first)
        there = torch.zeros(rounds, data.size, device=second)
        back = torch.zeros(rounds, data.size, device=first)
        staged = None
        if self.path is LinkPath.HOST:
            has_gpu = "cuda" in (first.type, second.type)
            staged = torch.zeros(2 * rounds, data.size, pin_memory=has_gpu)
        _wait(first, second)
        begin = time.perf_counter()
        for turn in range(rounds):
            if staged is None:
                there[turn].copy_(here, non_blocking=True)
                back[turn].copy_(there[turn], non_blocking=True)
            else:
                _through(here, staged[2 * turn], there[turn])
                _through(there[turn], staged[2 * turn + 1], back[turn])
            here = back[turn]
        _wait(first, second)
        seconds = time.perf_counter() - begin
        if seconds > limit:
            raise LinkTimeoutError
        return here.cpu().numpy(), seconds


def device_bandwidth(device: torch.device) -> float:
    """Return bytes per second of the fastest copy on a device; counts reads and writes."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(1 + PASSES):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * COPY_BYTES / best


def _through(source: torch.Tensor, staged: torch.Tensor, target: torch.Tensor) -> None:
    staged.copy_(source, non_blocking=True)
    _wait(source.device)
    target.copy_(staged, non_blocking=True)
    _wait(target.device)


def _wait(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
