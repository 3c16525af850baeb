"""Serves `appliance top` to browsers: textual-serve behind our own door.

Each browser tab is one process of the terminal dashboard. Needs the extra `web`.
"""

from __future__ import annotations

import hashlib
import html
import secrets
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp_jinja2
from aiohttp import web
from textual_serve.server import Server

from appliance.errors import RequestError
from appliance.server.dashboard.web_page import FOLDER
from appliance.server.http.key_ring import KeyRing
from appliance.server.http.keys import KeyCheck
from appliance.server.http.origins import Origins, check_site

if TYPE_CHECKING:
    import socket

    from appliance.config import ServerConfig

MAX_SESSIONS = 8  # processes of about 60 MiB each
MAX_TICKETS = 64
TICKET_SECONDS = 12 * 3600
COOKIE = "appliance_dashboard"
# textual-serve's page has inline scripts and styles, and loads a font from a public host.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self' {scheme}://{host}; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
KEY_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><title>appliance top</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<form method="post" action="/"><p>{reason}</p><label>API key
<input type="password" name="key" autocomplete="off" required autofocus></label>
<button>Watch</button></form></html>"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Tickets:
    """Tickets that browsers get in exchange for the key, limited in number and lifetime."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[bytes, float] = {}  # end by digest, oldest first

    def issue(self) -> str:
        ticket, now = secrets.token_urlsafe(32), self._clock()
        self._ends = {digest: end for digest, end in self._ends.items() if end > now}
        if len(self._ends) >= MAX_TICKETS:
            del self._ends[next(iter(self._ends))]
        self._ends[_digest(ticket)] = now + TICKET_SECONDS
        return ticket

    def knows(self, ticket: str) -> bool:
        return self._ends.get(_digest(ticket), 0.0) > self._clock()


class WebDashboard(Server):
    """Serves one server's dashboard to browsers.

    Args:
        config: address and key; without a key, serves only this machine.
    """

    def __init__(self, arguments: Sequence[str], config: ServerConfig) -> None:
        command = [sys.executable, "-P", "-m", "appliance", "top", *arguments]
        super().__init__(shlex.join(command), host=config.host, port=config.port)
        self.title = "appliance top"
        self._origins = Origins(config)
        self._keys = KeyCheck(KeyRing(config))
        self._tickets = Tickets()
        self._sessions = 0

    def run(self, sock: socket.socket) -> None:
        """Serve on a listening socket until a signal ends it."""
        web.run_app(self._make_app(), sock=sock, print=None, access_log=None, shutdown_timeout=2)

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing: the console belongs to the command line."""

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.router.add_post("/", self._take_key)
        app.router.add_get("/favicon.ico", _send_icon)

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app.middlewares.append(guard)
        return app

    async def handle_index(self, request: web.Request) -> web.Response:
        """Return the page, with URLs for the host name that the browser uses."""
        context = {
            "font_size": 16,
            "app_websocket_url": f"{_websocket_scheme(request)}://{request.host}/ws",
            "config": {"static": {"url": "/static/"}},
            "application": {"name": self.title},
        }
        return aiohttp_jinja2.render_template("app_index.html", request, context)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        if self._sessions >= MAX_SESSIONS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_SESSIONS} dashboards are open already")
        self._sessions += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._sessions -= 1

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._origins.check(
                request.headers.get("host", ""), request.headers.getall("origin", [])
            )
            if request.path != "/":
                check_site(request.headers.getall("sec-fetch-site", []))
        except RequestError as error:
            return web.Response(status=error.status, text=error.message)
        is_key = request.method == "POST" and request.path == "/"
        if not is_key and not self._knows(request):
            return _key_form("This dashboard wants the API key.")
        response = await handler(request)
        if not response.prepared:
            _harden(request, response)
        return response

    def _knows(self, request: web.Request) -> bool:
        if self._tickets.knows(request.cookies.get(COOKIE, "")):
            return True
        headers = request.headers
        given = headers.getall("authorization", []), headers.getall("x-api-key", [])
        try:
            self._keys.check(*given, request.remote or "")
        except RequestError:
            return False
        return True

    async def _take_key(self, request: web.Request) -> web.Response:
        """Exchange the right key for a ticket, so that no URL contains the key."""
        form = await request.post()
        try:
            self._keys.check([], [str(form.get("key", ""))], request.remote or "")
        except UnicodeEncodeError:
            return _key_form("The key is wrong.")
        except RequestError as error:
            return _key_form(f"{error.message[:1].upper()}{error.message[1:]}.")
        response = web.Response(status=303, headers={"location": "/", "cache-control": "no-store"})
        response.set_cookie(
            COOKIE,
            self._tickets.issue(),
            max_age=TICKET_SECONDS,
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        return response


async def _send_icon(request: web.Request) -> web.Response:
    return web.Response(body=(FOLDER / "icon.svg").read_bytes(), content_type="image/svg+xml")


def _digest(ticket: str) -> bytes:
    # Lookup by digest makes the time of a comparison useless.
    return hashlib.sha256(ticket.encode(errors="replace")).digest()


def _key_form(reason: str) -> web.Response:
    text = KEY_FORM.format(reason=html.escape(reason))
    policy = "default-src 'none'; form-action 'self'; frame-ancestors 'none'"
    return web.Response(
        status=401,
        text=text,
        content_type="text/html",
        headers={"content-security-policy": policy, "cache-control": "no-store"},
    )


def _harden(request: web.Request, response: web.StreamResponse) -> None:
    scheme = _websocket_scheme(request)
    headers: dict[str, Any] = {
        "content-security-policy": POLICY.format(scheme=scheme, host=request.host),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    response.headers.update(headers)


def _websocket_scheme(request: web.Request) -> str:
    return "wss" if request.secure else "ws"
