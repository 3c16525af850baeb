"""Finds what replicas ask of nodes: CPUs for threads, or GPUs, each replica on one node.

Ranks of one replica exchange sums through memory that they share, so they cannot be on two nodes.
Imports no Ray.
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
    """A node of the cluster, with what Ray may give away there."""

    address: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The share of a node that each replica gets.

    Attributes:
        cpus: threads of its engine; with GPUs, one for its server.
        gpus: one for each rank.
        most_on_a_node: replicas.
    """

    cpus: int
    gpus: int
    most_on_a_node: int

    @property
    def bundle(self) -> dict[str, int]:
        """The share in the form of Ray's placement groups."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def place(engine: EngineConfig, nodes: Sequence[Node], least: int, most: int) -> Placement:
    """Find what each replica gets: as many threads as there are, if the settings name no number.

    Args:
        least: replicas that must have room now.
        most: that should have room.

    Raises:
        ConfigError: there is no room for the least number, or none for the ranks on one node.
    """
    ranks = engine.tensor_parallel
    if engine.device != "cpu" and any(node.gpus for node in nodes):
        return _placed(nodes, lambda node: node.gpus, "GPU", ranks, ranks, least, gpus=True)
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
    return _placed(nodes, lambda node: node.cpus, "CPU", threads, ranks, least, gpus=False)


def _placed(
    nodes: Sequence[Node],
    free: Callable[[Node], int],
    kind: str,
    each: int,
    ranks: int,
    least: int,
    *,
    gpus: bool,
) -> Placement:
    largest = max(map(free, nodes))
    if each > largest:
        asked = f"--tensor-parallel {ranks}" if each == ranks else f"--threads {each}"
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
