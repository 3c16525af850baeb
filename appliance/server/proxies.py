"""Reverse proxies in front: their path prefix, and the client behind them.

An ASGI middleware outside all others, so that the door, the log and the limits see the client.
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
    """Takes requests as proxies pass them on.

    `X-Forwarded-For` and `X-Forwarded-Proto` count only from a proxy that is trusted: from anybody
    else, they are what a stranger likes to say. The path of the proxy may be there or be cut off.

    Args:
        config: says which proxies, and which path.

    Raises:
        ConfigError: a proxy is no address, or the path is none.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._root = root_path(config)
        self._app = app
        if proxies := _networks(config.trusted_proxies):
            self._behind: ASGIApp = ProxyHeadersMiddleware(self._route, proxies)  # type: ignore[arg-type, assignment]
        else:
            self._behind = self._route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        await self._behind(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self._root and scope["type"] == "http":
            path: str = scope["path"]
            if path == self._root:  # whose page needs the slash for its links
                app = RedirectResponse(f"{self._root}/", 308)
            elif path.startswith(f"{self._root}/"):
                scope = {**scope, "path": path.removeprefix(self._root)}
        await app(scope, receive, send)


def root_path(config: ServerConfig) -> str:
    """The path before all others, without a slash at its end; empty if there is none.

    Raises:
        ConfigError: it is no path.
    """
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
