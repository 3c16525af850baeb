"""Computes the resources of a replica: CPUs for threads, or GPUs, on one node.

Ranks of a replica exchange sums through shared memory, so they cannot span nodes. Imports no Ray.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.wording import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from appliance.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster and the resources that Ray may allocate there."""

    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A replica's share of a node.

    Attributes:
        cpus: its engine's threads; with GPUs, one for its server.
        most_on_a_node: replicas.
    """

    cpus: int
    gpus: int
    most_on_a_node: int

    @property
    def bundle(self) -> dict[str, int]:
        """The share as a bundle of Ray's placement groups."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def place(engine: EngineConfig, nodes: Sequence[Node], least: int, most: int) -> Placement:
    """Compute each replica's share; uses all threads if the settings give no number.

    Args:
        least: replicas that need room now.
        most: replicas that should have room.

    Raises:
        ConfigError: there is no room for `least` replicas, or none for the ranks on one node.
    """
    ranks, asked = engine.num_ranks, engine.ranks_setting
    if engine.device != "cpu" and any(node.gpus for node in nodes):
        return _placed(nodes, lambda node: node.gpus, "GPU", ranks, asked, least, gpus=True)
    if engine.device not in ("cpu", "auto"):
        raise ConfigError(
            f"--device {engine.device} needs GPUs, and Ray knows none in this cluster; use"
            " --device cpu"
        )
    threads = engine.threads or max(
        (
            share
            for share in range(ranks, max(node.cpus for node in nodes) + 1)
            if sum(node.cpus // share for node in nodes) >= most
        ),
        default=ranks,
    )
    if threads != ranks:
        asked = f"--threads {threads}"
    return _placed(nodes, lambda node: node.cpus, "CPU", threads, asked, least, gpus=False)


def _placed(
    nodes: Sequence[Node],
    free: Callable[[Node], int],
    kind: str,
    each: int,
    asked: str,
    least: int,
    *,
    gpus: bool,
) -> Placement:
    largest = max(map(free, nodes))
    if each > largest:
        raise ConfigError(
            f"{asked} needs {counted(each, kind)} on one node, and the largest has {largest}: what"
            " the processes of a replica exchange does not go over a network; use"
            f" {asked.split()[0]} {largest} or less"
        )
    room = sum(free(node) // each for node in nodes)
    if room < least:
        raise ConfigError(
            f"--replicas {least} with {counted(each, kind)} each does not fit: the cluster has room"
            f" for {room}; use --replicas {room} or less, or add nodes"
        )
    return Placement(1 if gpus else each, each if gpus else 0, largest // each)
