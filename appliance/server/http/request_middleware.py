"""Admits requests: Host, Origin and site against misled browsers, then the key.

An ASGI middleware around everything. Refuses by default and decides by `scope["path"]` and headers
alone, so no new route is open by accident.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from appliance.errors import RequestError
from appliance.server.http.errors import REQUEST_ID, FramingError, error_response
from appliance.server.http.keys import KeyCheck
from appliance.server.http.origins import Origins, check_site
from appliance.server.http.protocols import protocol_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.config import ServerConfig
    from appliance.server.http.key_ring import KeyRing
    from appliance.server.metrics.metrics import SharedMetrics

PREFLIGHT_SECONDS = 600  # lifetime in browsers' caches

_KEY_NAME = "key_name"  # key in a request's state
WELL_FORMED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{0,1000}")


def key_name(scope: Scope) -> str:
    """Return the name of a request's key; "" without keys."""
    name: str = scope["state"][_KEY_NAME]
    return name


class RequestMiddleware:
    """Checks every request, counts every response and gives it an id.

    Args:
        open_paths: those that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        keys: KeyRing,
        metrics: SharedMetrics,
        open_paths: frozenset[str],
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._metrics = metrics
        self._origins = Origins(config)
        self._keys = KeyCheck(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not WELL_FORMED_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        scope.setdefault("state", {})[REQUEST_ID] = request_id
        foreign: str | None = None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                response = MutableHeaders(scope=message)
                response["x-request-id"] = request_id
                if id_header := protocol_of(scope).id_header:
                    response[id_header] = request_id
                if foreign is not None:
                    response["access-control-allow-origin"] = foreign
                    response["access-control-expose-headers"] = "x-request-id, retry-after"
                    response.add_vary_header("origin")
                # Only known routes become labels: a stranger's paths would fill the metrics.
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.count_response(route, message["status"])
            await send(message)

        try:
            _check_framing(headers)
            foreign = self._origins.check(headers.get("host", ""), headers.getlist("origin"))
            if foreign is not None and _is_preflight(scope, headers):
                await _preflight(headers)(scope, receive, send_with_id)
                return
            if scope["path"] not in self._open_paths:
                if foreign is None:
                    check_site(headers.getlist("sec-fetch-site"))
                given = (
                    headers.getlist("authorization"),
                    headers.getlist("x-api-key"),
                    scope["client"][0] if scope.get("client") else "",
                )
                if seconds := self._keys.pause(*given):
                    await asyncio.sleep(seconds)
                name = self._keys.check(*given)
                scope["state"][_KEY_NAME] = name
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


def _check_framing(headers: Headers) -> None:
    """Refuse a body with two lengths: a proxy in front may have used the other one."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise FramingError("the request has both Content-Length and Transfer-Encoding; send one")


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight(headers: Headers) -> Response:
    """Answer a CORS preflight from an allowed origin."""
    wanted = headers.get("access-control-request-headers", "")
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": wanted if _HEADER_NAMES.fullmatch(wanted) else "",
        "access-control-max-age": str(PREFLIGHT_SECONDS),
    }
    if "access-control-request-private-network" in headers:
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)
