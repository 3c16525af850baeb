"""The API process's HTTP server; leaves signals to `serve`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from appliance.log import RepeatedWarningFilter
from appliance.server.app import create_app
from appliance.server.http.connection import protocol_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from appliance.server.http.certificate import Certificate
    from appliance.server.models.state import ServerState

KEEP_ALIVE_SECONDS = 30  # for connections without a request
_CLOSE_SECONDS = 2  # for responses that have just ended


class WebServer(uvicorn.Server):
    """Wakes up once a second instead of ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    @classmethod
    def of(cls, state: ServerState, certificate: Certificate | None) -> WebServer:
        log = logging.getLogger("uvicorn")
        log.handlers[:] = logging.getLogger("appliance").handlers
        log.setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").filters[:] = [
            RepeatedWarningFilter()
        ]  # strangers can trigger its messages
        return cls(
            uvicorn.Config(
                create_app(state),
                http=protocol_of(state.config.max_connections),  # type: ignore[arg-type]
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSE_SECONDS,
                ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until stopped; close sockets and connections also after a failure."""
        try:
            await super().serve(sockets)
        except Exception:
            if self.started:
                await self.shutdown(sockets)
            raise

    def stop(self, *, now: bool) -> None:
        """End connections: `now`, or after their responses."""
        self.should_exit, self.force_exit = True, now
        self._stopping.set()

    async def main_loop(self) -> None:
        """Update the Date header until told to stop; otherwise idle."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
