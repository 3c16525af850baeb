"""The API process's web application: the routes behind the door, every error in one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from appliance.errors import ApplianceError
from appliance.server import openapi
from appliance.server.access_log import AccessLog
from appliance.server.admin import admin_router
from appliance.server.door import Door
from appliance.server.engine_metrics import EngineCollector
from appliance.server.errors import error_response
from appliance.server.health import health_router
from appliance.server.idempotency import Idempotency
from appliance.server.machine_metrics import MachineCollector
from appliance.server.openai import openai_router
from appliance.server.page import page_router
from appliance.server.proxies import Proxies, root_path
from appliance.server.stream import ClientGoneError
from appliance.version import __version__

if TYPE_CHECKING:
    from appliance.server.state import ServerState

CLIENT_GONE_STATUS = 499  # nginx's number for a client that closed the connection


def create_app(state: ServerState) -> FastAPI:
    """Build the application of one server."""
    app = FastAPI(
        title="Appliance",
        version=__version__,
        docs_url=None,  # they load scripts from a public host
        redoc_url=None,
        redirect_slashes=False,
    )
    routers = (openai_router(state), health_router(state), admin_router(state), page_router())
    for router in routers:
        app.include_router(router)
    openapi.install(app, key_required=bool(state.keys()), root_path=root_path(state.config))
    state.metrics.add(EngineCollector(state))
    state.metrics.add(MachineCollector(state))
    app.add_middleware(Idempotency, max_body_bytes=state.config.max_body_bytes)
    app.add_middleware(Door, config=state.config, keys=state.keys, metrics=state.metrics)
    if state.config.access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(Proxies, config=state.config)  # the last one is the outermost
    for kind in (ApplianceError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)
