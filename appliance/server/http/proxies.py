"""Undoes reverse proxies: their path prefix and the client's address.

The outermost ASGI middleware, so that door, log and limits see the client.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from starlette.responses import RedirectResponse
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from appliance.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from appliance.config import ServerConfig


class Proxies:
    """Reads the headers of trusted proxies.

    Anyone can send `X-Forwarded-For` and `X-Forwarded-Proto`, so they count only from a trusted
    proxy. A proxy may keep its path prefix or strip it.

    Raises:
        ConfigError: a proxy is no address, or the path is invalid.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._root = root_path(config)
        self._app = app
        if proxies := _networks(config.trusted_proxies):
            self._behind: ASGIApp = ProxyHeadersMiddleware(self._route, proxies)  # type: ignore[arg-type, assignment]
        else:
            self._behind = self._route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._behind(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self._root and scope["type"] == "http":
            path: str = scope["path"]
            if path == self._root:  # the page's links need the slash
                app = RedirectResponse(f"{self._root}/", 308)
            elif path.startswith(f"{self._root}/"):
                scope = {**scope, "path": path.removeprefix(self._root)}
        await app(scope, receive, send)


def root_path(config: ServerConfig) -> str:
    """Normalize the path prefix, without a trailing slash; raise ConfigError if it is no path."""
    path = config.root_path.rstrip("/")
    if path and (not path.startswith("/") or any(c in path for c in "?#%\\ ") or "//" in path):
        raise ConfigError(f"--root-path {config.root_path!r} is no path; write it like /llm")
    return path


def _networks(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        try:
            ipaddress.ip_network(word)
        except ValueError:
            raise ConfigError(
                f"--trusted-proxies: {word!r} is no address or network; write it like 127.0.0.1 or"
                " 10.0.0.0/8"
            ) from None
    return words
