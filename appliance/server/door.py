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
from appliance.server.page import DOCUMENTS, FILES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from appliance.config import ServerConfig
    from appliance.server.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ready", *FILES, *DOCUMENTS})

_KEY_NAME = "key_name"  # in the state of a request
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
    """Knows keys by their digests; where there are none, everything is right.

    Args:
        keys: name to key.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = [(name, _digest(key.encode())) for name, key in keys.items()]

    def check(self, authorization: Sequence[str], api_keys: Sequence[str]) -> str:
        """Compare what was given with every key, in the same time whichever it is.

        Args:
            authorization: all Authorization headers.
            api_keys: all X-API-Key headers.

        Returns:
            The name of the key; empty where none is wanted.

        Raises:
            AuthError: none was given, or one is wrong.
        """
        if not self._digests:
            return ""
        keys = [*map(_bearer_key, authorization), *api_keys]
        if not keys:
            raise AuthError("an API key is needed: send it as Authorization: Bearer KEY")
        # Every one must be right, and of the same holder: a second header is no second guess.
        holders = {self._holder(_digest(_raw(key))) for key in keys}
        holder = holders.pop()
        if not holder or holders:
            raise AuthError("the API key is wrong")
        return holder

    def _holder(self, digest: bytes) -> str:
        found = ""
        for name, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found


def key_name(scope: Scope) -> str:
    """The name of the key that a request came with; empty where none is wanted."""
    name: str = scope["state"][_KEY_NAME]
    return name


class Door:
    """Checks every request, counts every response and gives it an id.

    Args:
        app: what is behind it.
        config: address and keys of the server.
        metrics: where responses are counted.
    """

    def __init__(self, app: ASGIApp, *, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._only_loopback = is_loopback(config.host)
        self._keys = KeyCheck(config.keys())

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
                name = self._keys.check(
                    headers.getlist("authorization"), headers.getlist("x-api-key")
                )
                scope.setdefault("state", {})[_KEY_NAME] = name
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
