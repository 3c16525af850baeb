"""Health routes for users, supervisors, load balancers and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from appliance.errors import EngineUnavailableError
from appliance.server.http.errors import error_response, json_response
from appliance.server.http.openapi import describes

if TYPE_CHECKING:
    from appliance.server.models.state import ServerState


class Health(msgspec.Struct, omit_defaults=True):
    """Answer of /health and /ready."""

    status: str  # ok, asleep, waking or loading: the most active of all models; in /ready, ready
    restarts: int = 0  # engine restarts; absent if 0
    quarantined: int = 0  # requests that killed engines and are refused for a while
    models: dict[str, str] = {}  # state by model id, if there are several
    replicas: dict[str, list[str]] = {}  # each model's engine processes, if several
    ranks: dict[str, list[str]] = {}  # in words, of each model that several processes divide
    unused_gpu: str = ""  # why a GPU that is here computes nothing, and what mends it


def health_router(server: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/health", **describes(None, Health))
    async def health(request: Request) -> Response:
        """Answer 200 while the engine works, sleeps or drains; otherwise 503 and the reason."""
        why = server.not_working
        engines = [model.engine for model in server.models]
        restarts = sum(engine.restarts for engine in engines)
        if why is None:
            states = {model.model_id: model.engine.state.value for model in server.models}
            return json_response(
                Health(
                    server.state_word,
                    restarts,
                    sum(engine.quarantined for engine in engines),
                    states if len(states) > 1 else {},
                    server.replica_states,
                    server.ranks_in_words,
                    server.unused_gpu,
                )
            )
        # Public, so it hides the reason of a failure.
        seconds = server.default.engine.seconds_to_start
        when = f"; restart {restarts + 1} begins in {seconds:.0f} s" if seconds > 0 else ""
        return error_response(
            EngineUnavailableError(f"the engine is {why}{when}", retry_after=seconds or None),
            request.scope,
        )

    @router.get("/ready", **describes(None, Health))
    async def ready(request: Request) -> Response:
        """Answer 200 if the server would accept a request now."""
        why = "draining" if server.draining else server.not_working
        able = [model for model in server.models if not model.doubtful]
        if why is None and not able:
            why = "waiting for the engine, which does not respond"
        if why is None and not any(model.queue.has_room() for model in able):
            why = "busy: the queue is full"
        if why is None:
            return json_response(Health("ready"))
        return error_response(EngineUnavailableError(f"the server is {why}"), request.scope)

    @router.get("/metrics", **describes(None, None, media_types=("text/plain",)))
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format, without asking the engine."""
        await server.machine.read()
        return Response(server.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
