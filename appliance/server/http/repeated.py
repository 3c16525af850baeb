"""An answer that is generated once and sent to several connections."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_ANSWER_BYTES = 4 * 2**20  # of an answer to keep
MAX_AHEAD = 8  # messages that wait for the fastest follower
FAILED = "failed"  # key in a request's state: its stream began well and ended badly


class SharedAnswer:
    """Begins with its first connection and ends when the last one leaves.

    Attributes:
        ended: when it was complete; None before.
        spoiled: not repeatable: it failed, was cut off, or is too large to keep.
    """

    def __init__(
        self, app: ASGIApp, scope: Scope, body: bytes, digest: bytes, clock: Callable[[], float]
    ) -> None:
        self.digest, self.scope = digest, scope
        self.ended: float | None = None
        self.spoiled = False
        self.num_bytes = 0
        self._clock = clock
        self._messages: list[Message | None] = []  # None once all followers have it
        self._error: Exception | None = None
        self._places: dict[int, int] = {}  # number of messages that each follower has
        self._num_followed = 0
        self._complete = False
        self._changed = asyncio.Event()
        self._abandoned = asyncio.Event()
        # Removed, so that a response cannot bypass this and write to the first connection.
        scope["extensions"] = {}
        self._make_with = app, body
        self._making: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """True once it had a connection."""
        return self._making is not None

    async def follow(self, receive: Receive, send: Send, *, again: bool) -> None:
        """Send the answer from its beginning, until it or the client ends.

        Args:
            again: add the header of a repetition.

        Raises:
            Exception: the answer's own failure.
        """
        number, self._num_followed = self._num_followed, self._num_followed + 1
        gone = asyncio.create_task(_disconnect(receive))
        try:
            self._places[number] = 0
            if self._making is None:  # not before: nobody would end it
                self._making = asyncio.create_task(self._make(*self._make_with))
            while not gone.done():
                place = self._places[number]
                if place < len(self._messages):
                    message = self._messages[place]
                    assert message is not None
                    await send(_marked(message) if again and place == 0 else message)
                    self._places[number] = place + 1
                    self._notify()
                elif self._complete or self.ended is not None:
                    break
                else:
                    waiting = asyncio.create_task(self._changed.wait())
                    await asyncio.wait({gone, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
            if self._error is not None and not self._messages:
                raise self._error
        finally:
            gone.cancel()
            self._places.pop(number, None)
            if not self._places and not self._complete:
                self.spoiled = True
                self._abandoned.set()
            self._notify()

    async def _make(self, app: ASGIApp, body: bytes) -> None:
        pieces: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if pieces:
                return pieces.pop()
            await self._abandoned.wait()
            return {"type": "http.disconnect"}

        try:
            await app(self.scope, receive, self._take)
        except Exception as error:  # raised to all followers
            self._error = error
        finally:
            if self._error is not None or self.scope["state"].get(FAILED):
                self.spoiled = True
            self.ended = self._clock()
            self._notify()

    async def _take(self, message: Message) -> None:
        """Add a message of the answer once the fastest follower has the earlier ones."""
        while self._places and max(self._places.values()) + MAX_AHEAD <= len(self._messages):
            await self._changed.wait()
        if message["type"] == "http.response.start" and not 200 <= message["status"] < 300:
            self.spoiled = True
        self.num_bytes += len(message.get("body", b""))
        self._messages.append(message)
        self._complete = message["type"] == "http.response.body" and not message.get("more_body")
        if self.num_bytes > MAX_ANSWER_BYTES:
            self.spoiled = True
        self._notify()

    def _notify(self) -> None:
        if self.spoiled and self._places:  # no more followers
            for place in range(min(self._places.values())):
                self._messages[place] = None
        self._changed.set()
        self._changed = asyncio.Event()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _marked(start: Message) -> Message:
    start = {**start, "headers": list(start["headers"])}
    MutableHeaders(scope=start)["idempotent-replayed"] = "true"
    return start
