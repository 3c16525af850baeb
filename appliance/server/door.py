"""Who may come in: Host and Origin against browsers that were talked into it, then the API key.

An ASGI middleware around everything. It refuses by default and decides on `scope["path"]` and
headers alone, so that a new route is never open by accident.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from appliance.errors import AuthError, RequestError
from appliance.server.errors import ForbiddenError, error_response
from appliance.server.page import FILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.config import ServerConfig
    from appliance.server.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ready", *FILES})

_HOST = re.compile(r"(?P<name>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "[::1]"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_origin(host: str, origins: Iterable[str], *, only_loopback: bool) -> None:
    """Refuse what a web page of somebody else's, or a name of somebody else's, brings here.

    Args:
        host: the Host header.
        origins: all Origin headers.
        only_loopback: whether the server listens for this machine alone.

    Raises:
        ForbiddenError: one of them is wrong.
    """
    host = host.lower()
    match = _HOST.fullmatch(host)
    if only_loopback and (match is None or match["name"] not in _LOOPBACK_NAMES):
        raise ForbiddenError(
            "this server answers to localhost, 127.0.0.1 and [::1] only; start it with --host "
            "to serve under another name",
            code="host_not_allowed",
        )
    for origin in origins:
        if origin.lower() not in {f"http://{host}", f"https://{host}"}:
            raise ForbiddenError(
                "requests from web pages of other origins are not accepted",
                code="origin_not_allowed",
            )


class KeyCheck:
    """Knows the server's key by its digest; without a key everything is right."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key.encode())

    def check(self, authorization: Sequence[str], api_keys: Sequence[str]) -> None:
        """Compare keys with the server's.

        Args:
            authorization: all Authorization headers.
            api_keys: all X-API-Key headers.

        Raises:
            AuthError: none was given, or one is wrong.
        """
        if self._digest is None:
            return
        keys = [*map(_bearer_key, authorization), *api_keys]
        if not keys:
            raise AuthError("an API key is needed: send it as Authorization: Bearer KEY")
        # Every one must be right: a second header is no second guess.
        right = [hmac.compare_digest(_digest(_raw(key)), self._digest) for key in keys]
        if not all(right):
            raise AuthError("the API key is wrong")


class Door:
    """Checks every request, counts every response and gives it an id.

    Args:
        app: what is behind it.
        config: address and key of the server.
        metrics: where responses are counted.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._only_loopback = is_loopback(config.host)
        self._key = KeyCheck(config.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                # Only known routes get a name: a stranger's paths would fill the metrics.
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.count_response(route, message["status"])
            await send(message)

        try:
            check_origin(
                headers.get("host", ""),
                headers.getlist("origin"),
                only_loopback=self._only_loopback,
            )
            if scope["path"] not in OPEN_PATHS:
                self._key.check(headers.getlist("authorization"), headers.getlist("x-api-key"))
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


def _bearer_key(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _raw(value: str) -> bytes:
    return value.encode("latin-1")  # as headers are decoded


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
