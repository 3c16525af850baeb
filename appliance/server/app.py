"""The web application of the API process: all routes behind the door, one error format."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route

from appliance.errors import ApplianceError
from appliance.server.anthropic.routes import anthropic_router
from appliance.server.dashboard.admin import admin_router
from appliance.server.dashboard.web_page import OPEN_PATHS, web_page_router
from appliance.server.health import health_router
from appliance.server.http import openapi
from appliance.server.http.access_log import AccessLog
from appliance.server.http.client_gone import ClientGoneError
from appliance.server.http.errors import error_response
from appliance.server.http.idempotency import Idempotency
from appliance.server.http.proxies import Proxies, root_path
from appliance.server.http.request_middleware import RequestMiddleware
from appliance.server.metrics.engine_metrics import EngineCollector
from appliance.server.metrics.machine import MachineCollector
from appliance.server.metrics.replica_metrics import RankCollector, ReplicaCollector
from appliance.server.models.adapters import adapters_router
from appliance.server.ollama.routes import MANAGING, ollama_router
from appliance.server.openai.routes import openai_router
from appliance.server.openai_responses.routes import responses_router
from appliance.server.retrieval.routes import retrieval_router
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.server.models.model_state import ModelState
    from appliance.server.models.state import ServerState

_LONGEST = 4  # names in a route's path

CLIENT_GONE_STATUS = 499  # nginx's status for a client that closed the connection


def create_app(server: ServerState) -> FastAPI:
    app = FastAPI(
        title="Appliance",
        version=__version__,
        docs_url=None,  # these pages load scripts from a public host
        redoc_url=None,
        redirect_slashes=False,
    )
    routers = (
        openai_router(server),
        responses_router(server),
        anthropic_router(server),
        ollama_router(server),
        retrieval_router(server),
        adapters_router(server),
        health_router(server),
        admin_router(server),
        web_page_router(),
    )
    for router in routers:
        app.include_router(router)
    openapi.install(app, key_required=bool(server.keys()), root_path=root_path(server.config))
    config = server.config
    for model in server.models:
        _collect(model)
    server.metrics.add(MachineCollector(server.warnings, server.machine))
    app.add_middleware(HeadOfGet)
    app.add_middleware(Idempotency, max_body_bytes=config.max_body_bytes)
    app.add_middleware(
        RequestMiddleware,
        config=config,
        keys=server.keys,
        metrics=server.metrics,
        open_paths=OPEN_PATHS,
    )
    if config.access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(Proxies, config=config)  # the last one added is the outermost
    answer_error = partial(_answer_error, [route for router in routers for route in router.routes])
    for kind in (ApplianceError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    return app


def _collect(model: ModelState) -> None:
    """Export a model's metrics."""
    engine, metrics = model.engine, model.metrics
    most = model.config.max_queue
    metrics.add(
        EngineCollector(engine, metrics, most, lambda: model.key_names, lambda: model.quality_facts)
    )
    metrics.add(ReplicaCollector(model.model_id, engine))
    metrics.add(RankCollector(model.model_id, engine))


class HeadOfGet:
    """Answers HEAD as GET without its body (RFC 9110, 9.3.2); a stream ends after its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inner = {**scope, "method": "GET"}

        async def send_head(message: Message) -> None:
            if message["type"] != "http.response.body":
                scope["route"] = inner.get("route")
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body", False):
                raise ClientGoneError("it asked for the headers only")

        await self._app(inner, receive, send_head)


async def _answer_error(
    routes: Sequence[BaseRoute], request: Request, error: Exception
) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 405:
        error.headers = {"Allow": ", ".join(sorted(_methods_of(routes, request.scope)))}
    if isinstance(error, HTTPException) and error.status_code == 404:
        path = request.scope["path"]
        managed = path.startswith(MANAGING)
        meant = _meant(routes, request.scope)
        if managed:
            error.detail = (
                f"{path[:100]!r} is not served: `appliance models` fetches and removes models"
            )
        elif meant is not None:
            error.detail = (
                f"there is no {path[:100]!r} here, but {meant!r}: change the base URL in the "
                "client's settings by what differs"
            )
            return error_response(error, {**request.scope, "path": meant})  # as its protocol has it
        else:
            error.detail = f"there is no {path[:100]!r} here; /openapi.json lists what there is"
    return error_response(error, request.scope)


def _methods_of(routes: Sequence[BaseRoute], scope: Scope) -> set[str]:
    """Return all methods of a path; Starlette reports only its first route's."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE:
            found |= route.methods or set()
    return found | {"HEAD"} if "GET" in found else found


def _meant(routes: Sequence[BaseRoute], scope: Scope) -> str | None:
    """Return the route of a path whose beginning is another: a client joined it to a wrong URL."""
    names = [name for name in scope["path"].split("/") if name][-_LONGEST:]
    for end in ("/".join(names[place:]) for place in range(len(names))):
        for path in (f"/{end}", f"/v1/{end}"):
            if _methods_of(routes, {**scope, "path": path}):
                return path[:100]
    return None


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)
