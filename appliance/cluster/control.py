"""Starts, shows and stops a model's replicas on a Ray cluster, as an application of Ray Serve."""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.cluster.node_facts import NodeFacts, agreed, look
from appliance.cluster.placement import Node, place
from appliance.config import known_keys, local_url
from appliance.config.api_keys import DIGEST, show_limits
from appliance.errors import ConfigError, EngineError
from appliance.server.http.listener import bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.cluster.deployments import ReplicaReport
    from appliance.cluster.placement import Placement
    from appliance.config import EngineConfig, ServerConfig, Settings


APP = "appliance"  # its name in Ray Serve
_LOOK_SECONDS = 3600.0  # a node may have to download the model
REPLICAS = "ServedReplica"  # its name in Ray Serve
_STATS_SECONDS = 1.0  # Ray's polling interval for replicas' statistics
_SPARE_SECONDS = 10.0  # to end in, in addition to the drain timeout
_STARTS = 3  # failed starts before Ray gives up
_ACTORS = {
    # Otherwise each token crosses two threads and two loops.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # HAProxy needs less to notice
}
_PROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # it forwards bytes without a Python process
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 are too few for a small, busy box
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
}


def start(settings: Settings, autoscale: tuple[int, int] | None, address: str | None) -> str:
    """Serve a model, or change its settings, replica after replica without a pause.

    Args:
        autoscale: minimum and maximum of replicas; None uses the settings' number.
        address: of the cluster; None finds it.

    Returns:
        The URL for clients on this machine.

    Raises:
        ConfigError: a setting does not fit the cluster, or its nodes differ.
        EngineError: no replica starts.
    """
    _check(settings)
    config = settings.server
    with connected(address) as ray:
        from ray import serve

        nodes = nodes_of(ray)
        least, most = autoscale or (settings.engine.replicas,) * 2
        placement = place(settings.engine, list(nodes.values()), least, most)
        if len(nodes) > 1 and not known_keys(config):
            raise ConfigError(
                "replicas on several nodes can be reached from other machines, so an API key is"
                " needed: set APPLIANCE_API_KEY"
            )
        facts = agreed(facts_of_nodes(ray, nodes, settings.engine))
        claim_address(config)
        app = application_of(settings, facts, placement, autoscale, len(nodes))
        try:
            serve.start(
                proxy_location="EveryNode",
                http_options={
                    "host": config.host,
                    "port": config.port,
                    "request_timeout_s": None,
                },
                controller_options={"runtime_env": {"env_vars": _PROXY}},
            )
            serve.run(app, name=APP, route_prefix="/")
        except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
            raise EngineError(f"the cluster cannot serve this: {reason(error)}") from None
    return local_url(config.host, config.port)


def reports(address: str | None) -> list[ReplicaReport]:
    """Ask all replicas for their reports.

    Raises:
        ConfigError: the cluster serves nothing.
    """
    with connected(address):
        from ray import serve

        if APP not in serve.status().applications:
            raise ConfigError("nothing is served on this cluster; run: appliance cluster serve")
        handle = serve.get_deployment_handle(REPLICAS, APP)
        found: list[ReplicaReport] = handle.broadcast("report").results()
        handle.shutdown()
    return found


def stop(address: str | None) -> bool:
    """End the replicas, and Ray Serve if it runs nothing else; return False if none ran."""
    with connected(address):
        from ray import serve

        running = serve.status().applications
        if APP in running:
            serve.delete(APP)
        if not running.keys() - {APP}:
            serve.shutdown()
    return APP in running


def _check(settings: Settings) -> None:
    if settings.models:
        raise ConfigError(
            "a cluster serves one model, and the configuration has a table for each of several;"
            " name one with: appliance cluster serve MODEL --config FILE"
        )
    for name, why in (
        ("min_quality", "quality cards are not read on the nodes; appliance card shows one"),
        ("tls_cert", "Ray's proxy speaks no HTTPS; put a reverse proxy in front of it"),
    ):
        if getattr(settings.server, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} is not for clusters: {why}")


def claim_address(config: ServerConfig) -> None:
    """Raise ConfigError unless Ray Serve listens, or can listen, at the configured address."""
    from ray import serve

    if not serve.status().proxies:
        bind(config).close()
        return
    from ray.serve.context import _get_global_client

    http = _get_global_client().http_config
    if (http.host, http.port) != (config.host, config.port):
        raise ConfigError(
            f"Ray Serve listens on {http.host} port {http.port} already; use --host {http.host}"
            f" --port {http.port}, or end it with: appliance cluster stop"
        )


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


def application_of(
    settings: Settings,
    facts: NodeFacts,
    placement: Placement,
    autoscale: tuple[int, int] | None,
    num_nodes: int,
) -> Any:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from appliance.cluster.deployments import (
        ClusterFront,
        ReplicaTerms,
        ServedReplica,
        wanted_replicas,
    )
    from appliance.cluster.prefix_router import PrefixRouter

    engine, config = settings.engine, settings.server
    end_seconds = config.drain_timeout + _SPARE_SECONDS
    if autoscale is None:
        number: dict[str, Any] = {"num_replicas": engine.replicas}
    else:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=autoscale[0],
                max_replicas=autoscale[1],
                target_ongoing_requests=max(1, engine.max_num_seqs // 2),
                policy=AutoscalingPolicy(policy_function=wanted_replicas),
            )
        }
    replica = serve.deployment(
        name=REPLICAS,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _ACTORS}},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        placement_group_bundles=[{"CPU": 0} | placement.bundle],
        placement_group_strategy="STRICT_PACK",
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_routing_stats_period_s=_STATS_SECONDS
        ),
        graceful_shutdown_timeout_s=end_seconds,
        max_constructor_retry_count=_STARTS,
        **number,
    )(ServedReplica)
    front = serve.deployment(
        num_replicas=num_nodes,
        max_replicas_per_node=1,
        max_ongoing_requests=config.max_connections,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _ACTORS}},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        graceful_shutdown_timeout_s=end_seconds,
    )(ClusterFront)
    told = msgspec.json.encode(_as_told(settings, placement))
    terms = ReplicaTerms(facts, placement.most_on_a_node, is_alone=num_nodes == 1)
    return front.bind(replica.bind(told, terms), told)


def _as_told(settings: Settings, placement: Placement) -> Settings:
    """Return the settings for nodes: keys as digests, and one engine each."""
    keys = {
        name: f"{DIGEST}{key.digest.hex()} {show_limits(key.limits)}".rstrip()
        for name, key in known_keys(settings.server).items()
    }
    bare = keys.pop("key", None)
    server = msgspec.structs.replace(
        settings.server,
        api_key=bare,
        api_keys=keys,
        api_key_file=None,
    )
    threads = None if placement.gpus else placement.cpus
    engine = msgspec.structs.replace(settings.engine, replicas=1, threads=threads)
    return msgspec.structs.replace(settings, server=server, engine=engine)
