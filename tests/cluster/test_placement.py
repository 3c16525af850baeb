"""The resources that a replica requests of a node, and the requests that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.cluster.placement import Node, Placement, place
from appliance.config import EngineConfig
from appliance.errors import ConfigError

BOXES = [Node("a", 4, 0), Node("b", 8, 0)]


def placed(nodes: list[Node], least: int, most: int = 0, **settings: Any) -> Placement:
    return place(EngineConfig(**settings), nodes, least, most or least)


@pytest.mark.parametrize(
    ("replicas", "threads", "on_a_node"), [(1, 8, 1), (2, 4, 2), (3, 4, 2), (4, 2, 4), (12, 1, 8)]
)
def test_replicas_divide_the_cpus(replicas: int, threads: int, on_a_node: int) -> None:
    assert placed(BOXES, replicas) == Placement(threads, 0, on_a_node)


def test_room_is_kept_for_as_many_as_the_load_may_want() -> None:
    assert placed(BOXES, 1, 6).cpus == 2
    assert placed(BOXES, 1, 100) == Placement(1, 0, 8), "and if there is none, least is enough"


def test_ranks_get_a_cpu_each_on_one_node() -> None:
    assert placed(BOXES, 3, tensor_parallel=3) == Placement(4, 0, 2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel 9 needs 9 CPUs on one node.* 8"):
        placed(BOXES, 1, tensor_parallel=9)
    with pytest.raises(ConfigError, match=r"--pipeline-parallel 9 .* use --pipeline-parallel 8"):
        placed(BOXES, 1, pipeline_parallel=9)
    with pytest.raises(ConfigError, match=r"--threads 10 .* use --threads 8 or less"):
        placed(BOXES, 1, threads=10)


def test_more_than_fit_are_refused_with_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"room for 12; use --replicas 12 or less, or add nodes"):
        placed(BOXES, 13)
    with pytest.raises(ConfigError, match=r"room for 3; use --replicas 3"):
        placed(BOXES, 4, threads=4)


def test_gpus_are_used_where_there_are_some() -> None:
    nodes = [Node("a", 8, 2), Node("b", 8, 1)]
    assert placed(nodes, 3) == Placement(1, 1, 2)
    assert placed(nodes, 3).bundle == {"CPU": 1, "GPU": 1}
    assert placed(nodes, 1, tensor_parallel=2) == Placement(1, 2, 1)
    assert placed(nodes, 2, device="cpu").gpus == 0
    with pytest.raises(ConfigError, match="room for 3"):
        placed(nodes, 4)
    with pytest.raises(ConfigError, match="use --device cpu"):
        placed(BOXES, 1, device="cuda")
