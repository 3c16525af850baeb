"""A device on the host whose results come as late as a real one's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.engine.run.device import Event, Graph
from appliance.engine.run.host_device import HostDevice

if TYPE_CHECKING:
    from collections.abc import Callable


class LateDevice(HostDevice):
    """What is fetched arrives when an event recorded later is waited for, and not before."""

    is_asynchronous = True

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.captures = 0

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        host, content = torch.full_like(tensor, -7), tensor.clone()
        self.queue.append(lambda: host.copy_(content))
        return host

    def record(self) -> Event:
        return Late(self, len(self.queue))

    def capture(self, function: Callable[[], None]) -> Graph:
        self.captures += 1
        return super().capture(function)


class Late:
    is_over = True

    def __init__(self, device: LateDevice, count: int) -> None:
        self.device, self.arrivals = device, device.queue[:count]

    @torch.inference_mode()
    def wait(self) -> None:
        for arrive in self.arrivals:
            arrive()
