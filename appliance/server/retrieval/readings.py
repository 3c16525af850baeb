"""Reads the prompts of one API request, a few at a time. Knows no wire format."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from appliance.engine.nouns.request import FinishReason
from appliance.errors import EngineDiedError, QueueTimeoutError, RequestError
from appliance.server.metrics.metrics import RequestTimer
from appliance.server.requests.answer import describe_outcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from appliance.engine.nouns.request import Request
    from appliance.server.models.model_state import ModelState

WINDOW = 32  # maximum of its requests in the engine at once

logger = logging.getLogger(__name__)


class Readings:
    """Reads prompts inside `with`; it holds nothing before and after.

    Args:
        requests: one per prompt, all from the same API key.
        request_id: id of the HTTP request, for the log.
    """

    def __init__(self, state: ModelState, requests: Sequence[Request], *, request_id: str) -> None:
        self._state = state
        self._request_id = request_id
        self._requests = requests
        self._owner = requests[0].owner
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._complete = False

    def __enter__(self) -> Self:
        """Take the key's share and the queue's room.

        Raises:
            EngineUnavailableError: the engine is not ready.
            QueueFullError: too many requests wait.
            RateLimitError: the API key has used up its limit.
        """
        state = self._state
        state.serving()
        state.queue.check(self._owner, 1, len(self._requests[0].prompt_token_ids))
        self._window = self._fitting()
        with ExitStack() as undo:
            undo.callback(state.use.begin(self._owner, self.prompt_tokens).end)
            self._timer = RequestTimer(state.metrics)
            undo.callback(self._end)
            self._held = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    async def pooled(self) -> list[bytes]:
        """Return each prompt's pooled states, float32 in the machine's byte order.

        Raises:
            RequestError: the engine refused a prompt, or it took too long.
            EngineError: the engine failed on a prompt, or died twice.
        """
        found: list[bytes | None] = [None] * len(self._requests)
        numbered = iter(enumerate(self._requests))

        async def work() -> None:
            for number, request in numbered:
                found[number] = await self._read(number, request)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._window):
                    group.create_task(work())
        except ExceptionGroup as group_of:
            raise group_of.exceptions[0] from None
        self._complete = True
        return [content for content in found if content is not None]

    def _end(self) -> None:
        self._timer.end(complete=self._complete)
        logger.info(
            "%s: %s, %d prompts of %d tokens read",
            self._requests[0].request_id,
            describe_outcome(self._request_id, complete=self._complete),
            len(self._requests),
            self.prompt_tokens,
        )

    def _fitting(self) -> int:
        """Take as many requests as the queue has room for now."""
        window = min(WINDOW, len(self._requests))
        while window > 1:
            tokens = sum(len(one.prompt_token_ids) for one in self._requests[:window])
            if self._state.queue.has_room(window, tokens):
                break
            window //= 2
        return window

    async def _read(self, number: int, request: Request) -> bytes:
        self._state.metrics.prompt_tokens.observe(len(request.prompt_token_ids))
        try:
            return await self._once(number, request)
        except EngineDiedError:
            await self._state.engine.ready()
            logger.warning("%s is begun again, since the engine died", request.request_id)
            return await self._once(number, request)

    async def _once(self, number: int, request: Request) -> bytes:
        metrics = self._state.metrics
        content = b""
        generation = self._state.engine.generate(request)
        try:
            async for delta in generation:
                content = delta.pooled or content
                if delta.queue_seconds is not None:
                    metrics.observe_wait(self._owner, delta.queue_seconds)
                if delta.finish_reason is None:
                    continue
                if delta.finish_reason is FinishReason.TIMEOUT:
                    metrics.count_expired(self._owner, "running")
                    raise _late()
                self._timer.tokens(number, 0, delta.queue_seconds)
                metrics.count_choice(delta.finish_reason.value)
        except QueueTimeoutError:
            metrics.count_expired(self._owner, "waiting")
            own, most = request.timeout, request.max_queue_seconds
            if own is not None and (most is None or own <= most):
                raise _late() from None
            raise
        finally:
            generation.close()
        return content


def _late() -> RequestError:
    return RequestError(
        "the timeout passed before all texts were read; allow more or send fewer",
        param="timeout",
        code="timeout",
    )
