"""Answers a repeated request once: by Idempotency-Key, or by X-Request-ID.

An ASGI middleware behind the door. A repetition during the first answer, or shortly after, gets the
same answer, streams included. It must come from the same API key and equal the first request in
everything else. Failures are not kept, so a retry runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from appliance.errors import RequestError
from appliance.server.http.body import read_body
from appliance.server.http.errors import error_response
from appliance.server.http.request_middleware import WELL_FORMED_ID, key_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEEP_SECONDS = 300.0  # lifetime after an answer's end
MAX_ANSWERS = 256
MAX_BYTES = 32 * 2**20  # of all kept answers
MAX_KEY = 255  # characters
MAX_ANSWER_BYTES = 4 * 2**20  # of an answer to keep
MAX_AHEAD = 8  # messages that wait for the fastest follower
FAILED = "failed"  # key in a request's state: its stream began well and ended badly

logger = logging.getLogger(__name__)


class RepeatedKeyError(RequestError):
    """Another request used this key."""

    status = 422


class _Name(NamedTuple):
    """Identity of a repeatable request."""

    holder: str
    header: str
    key: str


class Idempotency:
    """Answers a repeated request with the first answer."""

    def __init__(
        self, app: ASGIApp, *, max_body_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._clock = clock
        self.answers: OrderedDict[_Name, SharedAnswer] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            name = _name_of(scope)
            if name is None:
                await self._app(scope, receive, send)
                return
            body = await read_body(Request(scope, receive), max_bytes=self._max_body_bytes)
            answer, again = self._find(name, scope, body)
        except RequestError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        try:
            if again:
                logger.info("request %s came again, and gets the same answer", name.key)
                scope["route"] = answer.scope.get("route")
            await answer.follow(receive, send, again=again)
        finally:
            answer.spoiled |= not answer.has_begun
            self._forget_what_is_over()

    def _find(self, name: _Name, scope: Scope, body: bytes) -> tuple[SharedAnswer, bool]:
        """Return a request's answer, and True if it is a repetition.

        Raises:
            RepeatedKeyError: another request used its key.
        """
        self._forget_what_is_over()
        request = f"{scope['path']}?{scope['query_string'].decode('latin-1')}\n".encode()
        digest = hashlib.sha256(request + body).digest()
        found = self.answers.get(name)
        if found is not None and found.digest == digest:
            return found, True
        if found is not None and name.header == "idempotency-key":
            raise RepeatedKeyError(
                "this Idempotency-Key came with another request before; use a new one",
                code="idempotency_key_reused",
            )
        answer = SharedAnswer(self._app, scope, body, digest, self._clock)
        self.answers[name] = answer
        return answer, False

    def _forget_what_is_over(self) -> None:
        """Drop expired answers; keep running ones and the latest successful ones."""
        now = self._clock()
        for name, answer in list(self.answers.items()):
            if answer.spoiled or (answer.ended is not None and now - answer.ended > KEEP_SECONDS):
                del self.answers[name]
        total = sum(answer.num_bytes for answer in self.answers.values())
        for name, answer in list(self.answers.items()):
            if len(self.answers) <= MAX_ANSWERS and total <= MAX_BYTES:
                break
            if answer.ended is not None:
                total -= answer.num_bytes
                del self.answers[name]


def _name_of(scope: Scope) -> _Name | None:
    """Return a repeatable request's identity, or None.

    Raises:
        RequestError: its key is invalid.
    """
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    headers = Headers(scope=scope)
    key = headers.get("idempotency-key")
    if key is not None:
        if not (1 <= len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
            raise RequestError(
                f"an Idempotency-Key has 1 to {MAX_KEY} printable ASCII characters",
                code="invalid_idempotency_key",
            )
        return _Name(key_name(scope), "idempotency-key", key)
    request_id = headers.get("x-request-id", "")
    if WELL_FORMED_ID.fullmatch(request_id):
        return _Name(key_name(scope), "x-request-id", request_id)
    return None


class SharedAnswer:
    """An answer that is generated once and sent to several connections.

    Begins with its first connection and ends when the last one leaves.

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
