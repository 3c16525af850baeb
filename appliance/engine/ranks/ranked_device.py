"""Rank 0's device: watches the other ranks while it waits, and captures graphs in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.ranks.torch_ranks import TorchRanks
    from appliance.engine.run.device import Device, Event, Graph


@dataclass(frozen=True, slots=True)
class RankedDevice:
    """Wraps the device of a single rank; see `Device`."""

    device: Device
    ranks: TorchRanks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    def record(self) -> Event:
        return _WatchedEvent(self.device.record(), self.ranks)

    def synchronize(self) -> None:
        self.record().wait()
        self.device.synchronize()

    def capture(self, function: Callable[[], None]) -> Graph:
        """See `Device`; a CPU's graph calls the function, which sends the step to all ranks."""
        if self.device.torch_device.type == "cpu":
            return self.device.capture(function)
        return self.ranks.capture(self.device, function)


@dataclass(frozen=True, slots=True)
class _WatchedEvent:
    event: Event
    ranks: TorchRanks

    @property
    def is_over(self) -> bool:
        return self.event.is_over

    def wait(self) -> None:
        """Watch the other ranks meanwhile; raise EngineError if one has ended."""
        while not self.event.is_over:
            self.ranks.look()
        self.event.wait()
