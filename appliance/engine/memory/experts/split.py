"""Moves layers' experts to host memory until the rest fits a device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.errors import MemoryPlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.memory.experts.streaming import Streaming
    from appliance.engine.memory.plan import MemoryRequest


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """A layer's experts, with their bytes on the device and in host memory."""

    layer: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Layers with experts, in the order in which they leave the device.

    Attributes:
        asked: number that leave; None means as few as necessary.
        streaming: back to the device for steps with many rows; None for no plan.
    """

    layers: tuple[LayerExperts, ...]
    asked: int | None
    streaming: Streaming | None = None


@dataclass(frozen=True, slots=True)
class ExpertsOnHost:
    """The layers with experts in host memory.

    Attributes:
        num_bytes: of the experts there.
        is_asked: the user asked for them.
        streaming: see `ExpertChoice`.
    """

    layers: tuple[int, ...] = ()
    num_bytes: int = 0
    is_asked: bool = False
    streaming: Streaming | None = None

    @property
    def stream_bytes(self) -> int:
        """Memory on the device that streams take."""
        return 0 if self.streaming is None else self.streaming.device_bytes


NONE_ON_HOST = ExpertsOnHost()


def settle(request: MemoryRequest, divide: Callable[[MemoryRequest], object]) -> MemoryRequest:
    """Decide which layers' experts stay in host memory.

    Args:
        divide: raises MemoryPlanError if a settled request does not fit.

    Returns:
        A request with decided `experts`.

    Raises:
        MemoryPlanError: no split fits, or not the requested number.
    """
    choice = request.experts
    if choice is None:
        return request
    if choice.asked is None:
        return _fewest(request, choice, divide)
    settled = with_on_host(request, choice.asked)
    try:
        divide(settled)
    except MemoryPlanError as error:
        try:
            fewest = _fewest(request, choice, divide)
        except MemoryPlanError:
            raise error from None
        count = len(fewest.host_experts.layers)
        raise MemoryPlanError(f"{error}; --experts-on-cpu {count} would fit") from None
    return settled


def with_on_host(request: MemoryRequest, count: int) -> MemoryRequest:
    """Move the experts of the first layers of the choice to host memory."""
    if request.experts is None:
        return request
    moved = request.experts.layers[:count]
    num_bytes, free = sum(one.host_bytes for one in moved), request.host_budget_bytes
    numbers, is_asked = sorted(one.layer for one in moved), request.experts.asked is not None
    return replace(
        request,
        experts=None,
        weight_bytes=request.weight_bytes - sum(one.device_bytes for one in moved),
        host_budget_bytes=None if free is None else free - num_bytes,
        host_experts=ExpertsOnHost(
            tuple(numbers), num_bytes, is_asked, request.experts.streaming if moved else None
        ),
    )


def _fewest(
    request: MemoryRequest, choice: ExpertChoice, divide: Callable[[MemoryRequest], object]
) -> MemoryRequest:
    first: MemoryPlanError | None = None
    last: MemoryPlanError | None = None
    for count in range(len(choice.layers) + 1):
        settled = with_on_host(request, count)
        try:
            divide(settled)
        except MemoryPlanError as error:
            first, last = first or error, error
        else:
            return settled
    assert first is not None
    raise MemoryPlanError(
        f"{first}. Nor with the experts of all {len(choice.layers)} layers in host memory: {last}"
    )
