"""Describes a model's replicas and fronts as an application of Ray Serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from appliance.config import known_keys
from appliance.config.api_keys import DIGEST, show_limits

if TYPE_CHECKING:
    from appliance.cluster.node_facts import NodeFacts
    from appliance.cluster.placement import Placement
    from appliance.config import Settings

REPLICAS = "ServedReplica"  # its name in Ray Serve
_STATS_SECONDS = 1.0  # Ray's polling interval for replicas' statistics
_SPARE_SECONDS = 10.0  # to end in, in addition to the drain timeout
_STARTS = 3  # failed starts before Ray gives up
_ACTORS = {
    # Otherwise each token crosses two threads and two loops.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",  # HAProxy needs less to notice
}


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
