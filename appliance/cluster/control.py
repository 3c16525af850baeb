"""Starts, shows and stops a model's replicas on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.cluster.application import REPLICAS, application_of
from appliance.cluster.connection import APP, connected, facts_of_nodes, nodes_of, reason
from appliance.cluster.node_facts import agreed
from appliance.cluster.placement import place
from appliance.config import known_keys, local_url
from appliance.errors import ConfigError, EngineError
from appliance.server.http.listener import bind

if TYPE_CHECKING:
    from appliance.cluster.deployments import ReplicaReport
    from appliance.config import ServerConfig, Settings

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
        _claim_address(config)
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


def _claim_address(config: ServerConfig) -> None:
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
