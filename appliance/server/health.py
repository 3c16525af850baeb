"""Health routes for people, supervisors, load balancers and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from appliance.engine.process.supervisor import EngineState
from appliance.errors import EngineUnavailableError
from appliance.server.errors import error_response, json_response
from appliance.server.openapi import describes

if TYPE_CHECKING:
    from appliance.server.state import ServerState


class Health(msgspec.Struct, omit_defaults=True):
    """Answer of /health and /ready."""

    status: str  # ok, asleep or waking; of /ready, ready
    restarts: int = 0  # of the engine; left out where there were none
    quarantined: int = 0  # requests that are refused for a while, because engines died of them


def health_router(state: ServerState) -> APIRouter:
    """The routes, for one server."""
    router = APIRouter()

    @router.get("/health", **describes(None, Health))
    async def health(request: Request) -> Response:
        """200 while the engine works or sleeps, also while the server drains; else 503, and why."""
        why = state.not_working
        engine = state.engine
        if why is None:
            word = "ok" if engine.state is EngineState.READY else engine.state.value
            return json_response(Health(word, engine.restarts, engine.quarantined))
        # Open to all, so it does not tell the reason of a failure.
        seconds = engine.seconds_to_start
        when = f"; restart {engine.restarts + 1} begins in {seconds:.0f} s" if seconds > 0 else ""
        return error_response(
            EngineUnavailableError(f"the engine is {why}{when}", retry_after=seconds or None),
            request.scope,
        )

    @router.get("/ready", **describes(None, Health))
    async def ready(request: Request) -> Response:
        """200 if a request that comes now would be accepted."""
        why = state.unavailable
        if why is None and state.doubtful:
            why = "waiting for the engine, which does not respond"
        if why is None and not state.queue.has_room():
            why = "busy: the queue is full"
        if why is None:
            return json_response(Health("ready"))
        return error_response(EngineUnavailableError(f"the server is {why}"), request.scope)

    @router.get("/metrics", **describes(None, None, media_types=("text/plain",)))
    async def metrics() -> Response:
        """Metrics in Prometheus' text format; the engine is not involved."""
        await state.machine.read()
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router
