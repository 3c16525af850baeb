"""Lines of the process that tests devices' links. Imports no torch."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from appliance.engine.links.link import LinkPath

if TYPE_CHECKING:
    from collections.abc import Sequence


class LinkTask(msgspec.Struct, frozen=True):
    """One test: devices by their place in the list, and the path between them."""

    first: int
    second: int
    path: LinkPath


class ProbeOrder(msgspec.Struct, frozen=True):
    """The only argument of the process, as JSON.

    Attributes:
        devices: torch's names.
        measures: measure their memory first.
        limit: seconds per test.
    """

    devices: tuple[str, ...]
    tasks: tuple[LinkTask, ...]
    measures: bool
    limit: float


class DeviceMemory(msgspec.Struct, frozen=True, tag=True):
    """A device's memory bandwidth, bytes per second of a copy, and its free bytes.

    Attributes:
        free_bytes: None if the memory is the host's.
    """

    place: int
    bytes_per_second: float
    free_bytes: int | None


class TaskBegun(msgspec.Struct, frozen=True, tag=True):
    """A test that may never end."""

    task: LinkTask


class TaskEnded(msgspec.Struct, frozen=True, tag=True):
    """The result of the test begun last; see `LinkTrial`."""

    seconds: float
    bytes_per_second: float
    problem: str


ProbeLine: TypeAlias = DeviceMemory | TaskBegun | TaskEnded


def all_tasks(devices: Sequence[str]) -> list[LinkTask]:
    """List both paths of each pair, the straight one first."""
    return [
        LinkTask(first, second, path)
        for first, second in combinations(range(len(devices)), 2)
        for path in (LinkPath.PEER, LinkPath.HOST)
    ]
