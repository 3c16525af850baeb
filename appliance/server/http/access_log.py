"""Logs each request's key, route, status and time, on demand.

Never logs the private parts: query, headers and body.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from appliance.server.http.errors import request_id_of
from appliance.server.http.request_middleware import key_name

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware around the door, so it logs refused requests too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        logger.setLevel(logging.INFO)  # --access-log asks for it, so any --log-level shows it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        status = 0

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            fields = {
                "client": scope["client"][0] if scope.get("client") else "-",
                "key": _holder(scope),
                "method": scope["method"],
                "path": scope["path"],
                "status": status or "-",
                "seconds": round(time.monotonic() - begin, 3),
                "request_id": request_id_of(scope) or "-",
            }
            logger.info(
                "%(client)s %(key)s %(method)s %(path)s %(status)s %(seconds).3fs %(request_id)s",
                fields,
                extra={"fields": fields},
            )


def _holder(scope: Scope) -> str:
    """Return the key's name; "-" without keys or for a refused request."""
    try:
        return key_name(scope) or "-"
    except KeyError:
        return "-"
