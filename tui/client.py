"""Follows a server's event feed; reconnects after every failure.

Publishes `Event`s and `ConnectionChange`s; knows nothing of drawing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from typing import TYPE_CHECKING

import httpx
import msgspec

from appliance.events import Delta, Snapshot, Stats, decode_event
from appliance.tui.server import CONNECT_TIMEOUT
from appliance.tui.sse import EventDecoder
from appliance.tui.state import ConnectionChange, ConnectionPhase, FeedItem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from appliance.tui.server import Server

logger = logging.getLogger(__name__)

EVENTS_PATH = "/admin/v1/events"
FIRST_RETRY = 0.5  # seconds; doubles with every failure in a row
LAST_RETRY = 8.0
SILENCE_TIMEOUT = 20.0  # stats come every second, comments while there are none
MAX_LATENESS = 10.0  # seconds; a connection with more delay is dropped
MAX_STRAY_DELTAS = 10  # of an epoch without a snapshot, before reconnecting
_HEADERS = {"Accept": "text/event-stream"}


class FeedError(Exception):
    """The feed ended or never began; `phase` tells which."""

    def __init__(self, phase: ConnectionPhase, reason: str) -> None:
        super().__init__(reason)
        self.phase = phase
        self.reason = reason


class Lateness:
    """Measures a connection's delay against its own fastest message.

    The server stops sending when nobody reads, but a tunnel or proxy may buffer.
    """

    def __init__(self) -> None:
        self._least = math.inf

    def of(self, stats: Stats, now: float) -> float:
        """Return the delay in seconds; the two clocks may differ.

        `now` is in Unix seconds.
        """
        way = now - stats.time
        self._least = min(self._least, way)
        return way - self._least


class EventFeed:
    """The feed of one server.

    Args:
        first_retry: seconds before the first new attempt.

    Attributes:
        replica: replica whose blocks and sequences the next connection sends.
    """

    def __init__(self, server: Server, *, first_retry: float = FIRST_RETRY) -> None:
        self.server = server
        self.replica = 0
        self.name = str(server.url).rstrip("/")
        self._first_retry = self._retry = first_retry

    async def follow(self, publish: Callable[[FeedItem], None]) -> None:
        """Publish the server's events and every change of the connection, until cancelled.

        Args:
            publish: called in order; if it raises ValueError for an invalid event, the feed
                reconnects.
        """
        async with self.server.client(SILENCE_TIMEOUT) as client:
            while True:
                try:
                    await self._read(client, publish)
                except FeedError as error:
                    phase, reason = error.phase, error.reason
                except (msgspec.MsgspecError, ValueError) as error:
                    phase, reason = ConnectionPhase.LOST, f"the feed cannot be read: {error}"
                logger.info("feed of %s: %s", self.name, reason)
                retry, self._retry = self._retry, min(2 * self._retry, LAST_RETRY)
                publish(ConnectionChange(phase, reason, time.monotonic() + retry))
                await asyncio.sleep(retry)

    async def _read(self, client: httpx.AsyncClient, publish: Callable[[FeedItem], None]) -> None:
        """Connect once and publish until the feed ends.

        Raises:
            FeedError: always, when the feed ends.
            msgspec.MsgspecError: an event does not match its name.
            ValueError: a frame is too large, or `publish` refused its event.
        """
        frames = EventDecoder()
        answered = False
        epoch: int | None = None
        strays = 0
        lateness = Lateness()
        try:
            url = self.server.path(EVENTS_PATH)
            if self.replica:
                url = url.copy_merge_params({"replica": self.replica})
            async with client.stream("GET", url, headers=_HEADERS) as response:
                answered = True
                _require_feed(response)
                publish(ConnectionChange(ConnectionPhase.LIVE))
                async for received in response.aiter_bytes():
                    for name, data in frames.feed(received):
                        event = decode_event(name, data)
                        if event is None:
                            continue
                        publish(event)
                        if isinstance(event, Stats):
                            late = lateness.of(event, time.time())
                            if late > MAX_LATENESS:
                                raise FeedError(
                                    ConnectionPhase.LOST, f"a slow link: {late:.0f} s behind"
                                )
                        elif isinstance(event, Snapshot):
                            epoch, strays, self._retry = event.epoch, 0, self._first_retry
                        elif isinstance(event, Delta) and event.epoch != epoch:
                            strays += 1
                            if strays > MAX_STRAY_DELTAS:
                                raise FeedError(
                                    ConnectionPhase.LOST, "a snapshot of the blocks is missing"
                                )
        except httpx.RequestError as error:
            raise FeedError(ConnectionPhase.LOST, _in_words(error, answered=answered)) from error
        cut = frames.in_frame
        raise FeedError(
            ConnectionPhase.LOST, "cut in the middle of a frame" if cut else "the feed ended"
        )


def _require_feed(response: httpx.Response) -> None:
    status = response.status_code
    if status in (401, 403):
        if status == 401 and "authorization" not in response.request.headers:
            raise FeedError(
                ConnectionPhase.NO_KEY,
                "set APPLIANCE_API_KEY to the server's key, or api_key in the configuration file",
            )
        raise FeedError(
            ConnectionPhase.UNAUTHORIZED,
            "the server refused the key; set APPLIANCE_API_KEY to one that it knows",
        )
    if status == 429 or status >= 500:
        raise FeedError(
            ConnectionPhase.LOST, f"the server answered {status} {response.reason_phrase}"
        )
    kind = response.headers.get("content-type", "").partition(";")[0].strip()
    if status != 200 or kind != "text/event-stream":
        raise FeedError(
            ConnectionPhase.FOREIGN,
            f"not an appliance: {EVENTS_PATH} answered {status} {kind or 'without a type'}",
        )


def _in_words(error: httpx.RequestError, *, answered: bool) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return f"nothing came for {SILENCE_TIMEOUT:.0f} s"
    if isinstance(error, httpx.ConnectTimeout):
        return f"no answer within {CONNECT_TIMEOUT:.0f} s"
    causes = list(_causes(error))
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "connection refused; is the server running?"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return f"the name {error.request.url.host} is unknown"
    if answered:
        return "the connection was cut"
    return str(error) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                yield from _causes(one)
        error = error.__cause__ or error.__context__
