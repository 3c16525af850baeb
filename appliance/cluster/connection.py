"""Connects to a Ray cluster, and looks at its nodes."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from appliance.cluster.node_facts import NodeFacts, look
from appliance.cluster.placement import Node
from appliance.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.config import EngineConfig

APP = "appliance"  # its name in Ray Serve
_LOOK_SECONDS = 3600.0  # a node may have to download the model


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Connect to a Ray cluster and yield the module `ray`.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    # Otherwise a Serve thread that outlives the connection starts its own cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve is not installed here ({error}); run: pip install 'appliance[ray]'"
        ) from None
    for noisy in ("ray", "ray.serve"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                address or "auto", namespace=APP, logging_level=logging.ERROR, log_to_driver=False
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"at {address}" if address else "on this machine"
        raise ConfigError(
            f"there is no Ray cluster {where} ({reason(error)}); start one with: ray start --head,"
            " and ray start --address=HEAD:6379 on every other node"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def nodes_of(ray: Any) -> dict[str, Node]:
    return {
        node["NodeID"]: Node(
            node["NodeManagerAddress"],
            int(node["Resources"].get("CPU", 0)),
            int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
    }


def facts_of_nodes(ray: Any, nodes: dict[str, Node], engine: EngineConfig) -> dict[str, NodeFacts]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {
        node: ray.remote(look)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(engine)
        for node in nodes
    }
    found: dict[str, NodeFacts] = {}
    for number, (node, future) in enumerate(asked.items()):
        address = nodes[node].address
        name = address if address not in found else f"{address} ({number})"
        try:
            found[name] = ray.get(future, timeout=_LOOK_SECONDS)
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"node {name} cannot look for the model: {reason(error)}; install the same version"
                " of the appliance on all nodes: pip install 'appliance[ray]'"
            ) from None
    return found


def reason(error: BaseException) -> str:
    """Return the last line of an error, which holds the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
