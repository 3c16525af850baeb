"""Ray Serve's actors on nodes: replicas with a server each, and the fronts before them."""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.serve import ingress

from appliance import log
from appliance.cluster.front import BLOCK_SIZE, ChosenReplica, ReplicaRequest, make_front
from appliance.cluster.node_facts import NodeFacts, check, look
from appliance.cluster.prefix_router import ASKED, BLOCKS, URL
from appliance.config import Settings, with_cache_folders
from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineError
from appliance.hub.found_model import find_model_of
from appliance.long_lived import start_task
from appliance.runtime import free_host_bytes
from appliance.server.api_server import opened_server
from appliance.server.models.model_state import ModelToServe

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp

    from appliance.server.api_server import RunningServer

WAIT_SECONDS = 30.0  # a request's wait while there is no replica
_SEQUENCES = "sequences"  # the metric that replicas send to the autoscaler


class ReplicaReport(msgspec.Struct, frozen=True):
    """A replica in `appliance cluster status`.

    Attributes:
        sequences: running or waiting.
        hit_rate: share of prompt tokens found in its cache.
        pid: its server's, on the node.
    """

    node: str
    url: str
    state: str
    sequences: int
    hit_rate: float
    restarts: int
    pid: int


class ReplicaTerms(msgspec.Struct, frozen=True):
    """Facts that a replica needs besides the settings.

    Attributes:
        expected: the facts that its node must match.
        most_on_a_node: replicas that divide the memory of a node without GPUs.
        is_alone: there is only one node, so other machines need not reach its replicas.
    """

    expected: NodeFacts
    most_on_a_node: int
    is_alone: bool


class ServedReplica:
    """A Ray actor that runs a single-box server with one engine process.

    Args:
        settings: the server's, as JSON.

    Raises:
        ApplianceError: the node differs from the others, or the model fails to load.
    """

    async def __init__(self, settings: bytes, terms: ReplicaTerms) -> None:  # type: ignore[misc]
        decoded = with_cache_folders(msgspec.json.decode(settings, type=Settings))
        log.configure(decoded.server.log_level, decoded.server.log_format)
        check(terms.expected, await asyncio.to_thread(look, decoded.engine))
        found, engine = await asyncio.to_thread(find_model_of, decoded.engine)
        self._node = ray.util.get_node_ip_address()
        memory = decoded.server.models_memory
        if memory is None and terms.most_on_a_node > 1:
            memory = free_host_bytes() // terms.most_on_a_node
        host = "127.0.0.1" if terms.is_alone else self._node
        server = msgspec.structs.replace(decoded.server, host=host, port=0, models_memory=memory)
        decoded = msgspec.structs.replace(decoded, server=server, engine=engine)
        ready: asyncio.Future[RunningServer] = asyncio.get_running_loop().create_future()
        self._opened = ExitStack()
        self._server = self._opened.enter_context(
            opened_server(decoded, [ModelToServe(found, engine)])
        )
        run = partial(self._server.run, lambda *_: None, ready.set_result, signals=False)
        self._failure: Exception | None = None
        self._task = start_task(run, "served-replica", self._note_end)
        both: set[asyncio.Future[Any]] = {self._task, ready}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._opened.close()
            raise self._failure or EngineError("the server ended before it was ready")
        self._running = ready.result()
        self._engine = self._server.state.default.engine

    def _note_end(self, error: Exception | None) -> None:
        self._failure = error

    def record_routing_stats(self) -> dict[str, Any]:
        """Report the server's address and its cache's number of blocks (called by Ray)."""
        info = self._running.info
        blocks = info.num_blocks if self._engine.config.prefix_caching else 0
        blocks += blocks * info.kv_host_bytes // max(1, info.kv_bytes)
        # A block of text has its own size.
        return {URL: self._running.url, BLOCKS: blocks * info.block_size // BLOCK_SIZE}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the number of sequences (called by Ray)."""
        return {_SEQUENCES: float(self._engine.num_sequences)}

    def check_health(self) -> None:
        """Raise EngineError if the server has ended, so that Ray starts another (called by Ray)."""
        if self._task.done() or self._engine.state is EngineState.FAILED:
            raise EngineError(f"the server has ended: {self._failure or self._engine.reason}")

    def report(self) -> ReplicaReport:
        """Describe the replica for display."""
        stats = self._engine.stats
        return ReplicaReport(
            self._node,
            self._running.url,
            self._engine.state.value,
            self._engine.num_sequences,
            stats.prefix_hits_total / max(1, stats.prefix_queries_total),
            self._engine.restarts,
            os.getpid(),
        )

    async def __del__(self) -> None:
        """Stop the server and wait until it has drained (called by Ray)."""
        if not hasattr(self, "_task"):
            return
        self._server.stop()
        await asyncio.wait({self._task})
        self._opened.close()


@ingress()
class ClusterFront:
    """Takes requests from Ray's proxy on the node.

    Args:
        settings: the server's, as JSON.
    """

    def __init__(self, replicas: DeploymentHandle[ServedReplica], settings: bytes) -> None:
        self._config = msgspec.json.decode(settings, type=Settings).server
        log.configure(self._config.log_level, self._config.log_format)
        self._replicas = replicas
        # Ray's loop would cost each request two thread switches.
        replicas._init(_run_router_in_separate_loop=False)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Build the application (called by Ray)."""
        return make_front(self._config, self._choose)

    async def _choose(self, asked: ReplicaRequest) -> ChosenReplica | None:
        # Reserves nothing: a replica has its own queue.
        wanted = self._replicas.choose_replica(**{ASKED: asked}, _reserve=False)
        async with asyncio.timeout(WAIT_SECONDS), wanted as chosen:
            replica = chosen._replica
        name = replica.replica_id.unique_id
        return None if name in asked.tried else ChosenReplica(name, replica.routing_stats[URL])


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas for all their sequences (called by Ray)."""
    counts = (context.aggregated_metrics or {}).get(_SEQUENCES, {}).values()
    return math.ceil(sum(counts) / context.config.get_target_ongoing_requests()), {}
