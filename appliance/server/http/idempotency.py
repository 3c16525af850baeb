"""Answers a repeated request once: by Idempotency-Key, or by X-Request-ID.

An ASGI middleware behind the door. A repetition during the first answer, or shortly after, gets the
same answer, streams included. It must come from the same API key and equal the first request in
everything else. Failures are not kept, so a retry runs.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request

from appliance.errors import RequestError
from appliance.server.http.body import read_body
from appliance.server.http.errors import error_response
from appliance.server.http.repeated import SharedAnswer
from appliance.server.http.request_middleware import WELL_FORMED_ID, key_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

KEEP_SECONDS = 300.0  # lifetime after an answer's end
MAX_ANSWERS = 256
MAX_BYTES = 32 * 2**20  # of all kept answers
MAX_KEY = 255  # characters

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
        self._answers: OrderedDict[_Name, SharedAnswer] = OrderedDict()

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
        found = self._answers.get(name)
        if found is not None and found.digest == digest:
            return found, True
        if found is not None and name.header == "idempotency-key":
            raise RepeatedKeyError(
                "this Idempotency-Key came with another request before; use a new one",
                code="idempotency_key_reused",
            )
        answer = SharedAnswer(self._app, scope, body, digest, self._clock)
        self._answers[name] = answer
        return answer, False

    def _forget_what_is_over(self) -> None:
        """Drop expired answers; keep running ones and the latest successful ones."""
        now = self._clock()
        for name, answer in list(self._answers.items()):
            if answer.spoiled or (answer.ended is not None and now - answer.ended > KEEP_SECONDS):
                del self._answers[name]
        total = sum(answer.num_bytes for answer in self._answers.values())
        for name, answer in list(self._answers.items()):
            if len(self._answers) <= MAX_ANSWERS and total <= MAX_BYTES:
                break
            if answer.ended is not None:
                total -= answer.num_bytes
                del self._answers[name]


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
