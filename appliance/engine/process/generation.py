"""Open requests: the deltas of each as they arrive, then its end or an error; and their count."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Protocol

from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason
from appliance.errors import EngineError, QueueTimeoutError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.nouns.request import Request


MAX_BACKLOG = 4096  # maximum number of unread deltas


class Submitter(Protocol):
    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def forget(self, generation: Generation, *, complete: bool) -> None:
        """Drop a request that its consumer closed; `complete` if it read everything."""
        ...


class Generation(AsyncIterator[SequenceDelta]):
    """The deltas of one request, as they arrive; submitted on construction.

    Always close it: closing early aborts the request.
    """

    def __init__(self, client: Submitter, request: Request) -> None:
        self.request = request
        self.started = False  # it left the engine's queue
        self.submissions = 0  # processes that it was sent to
        self.is_suspect = False  # an engine died while it ran an equal request
        self._client = client
        self._open = set(range(request.sampling.num_choices))  # choices the consumer reads
        self._awaited = set(self._open)  # choices that the engine has not finished
        self._arrived: deque[SequenceDelta] = deque()
        self._error: Exception | None = None  # raised after the deltas
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_awaited(self) -> bool:
        """True if the engine owes more of it, apart from unread deltas."""
        return bool(self._awaited) and self._error is None

    @property
    def backlog(self) -> int:
        return len(self._arrived)

    async def __anext__(self) -> SequenceDelta:
        """Return the next delta of an open choice.

        Raises:
            RequestError: the engine refused the request.
            EngineError: the engine failed or died.
        """
        while (delta := self.ready()) is None:
            changed = asyncio.get_running_loop().create_future()
            if self.is_over(then=changed):
                raise StopAsyncIteration
            await changed
        return delta

    def is_over(self, *, then: asyncio.Future[None]) -> bool:
        """Return True if no choice is open; otherwise the next change sets a future's result.

        Ask once `ready` returns None.

        Raises:
            RequestError: the engine refused the request.
            EngineError: the engine failed or died.
        """
        if not self._open:
            return True
        if self._error is not None:
            raise self._error
        self._waiter = then
        return False

    def ready(self) -> SequenceDelta | None:
        """Return the next delta if it has arrived; the iterator raises errors."""
        while self._arrived and self._open:
            delta = self._arrived.popleft()
            if delta.index not in self._open:
                continue
            if delta.finish_reason is FinishReason.ABORT:
                self.fail(EngineError("the engine aborted this request"))
                return None
            if delta.finish_reason is not None:
                self._open.remove(delta.index)
            return delta
        return None

    def close_choice(self, index: int) -> None:
        """Stop one choice while the others continue.

        Another task may be waiting for its next delta.
        """
        if index in self._open:
            self._open.remove(index)
            self._awaited.discard(index)
            self._client.abort(self.request.request_id, index)
            self._wake()

    def close(self) -> None:
        complete = not self._open and self._error is None
        self._open.clear()
        self._client.forget(self, complete=complete)

    def move(self, client: Submitter) -> None:
        """Belong to another client from now on."""
        self._client = client

    def put(self, delta: SequenceDelta) -> None:
        if delta.error is not None:
            self.fail(_error_of(delta, delta.error))
        elif self._error is None:
            if delta.finish_reason is not None:
                self._awaited.discard(delta.index)
            self._arrived.append(delta)
            self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error after the deltas that have arrived; the first error wins."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _error_of(delta: SequenceDelta, message: str) -> Exception:
    if delta.expired:
        return QueueTimeoutError(message)
    return RequestError(message) if delta.refused else EngineError(message)


class OpenRequests(ABC):
    """Counts and finds the open requests of an engine process, or of several."""

    @abstractmethod
    def _open(self) -> Iterable[Generation]: ...

    @property
    def num_waiting(self) -> int:
        """Number of requests that no engine has started."""
        return sum(not one.started for one in self._open())

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(one.request.prompt_token_ids) for one in self._open() if not one.started)

    def num_waiting_of(self, owner: str) -> int:
        """Count an owner's requests that no engine has started."""
        return sum(not one.started and one.request.owner == owner for one in self._open())

    @property
    def num_running(self) -> int:
        """Number of requests that an engine has started and not finished."""
        return sum(one.started for one in self._open())

    @property
    def num_running_sequences(self) -> int:
        return sum(one.request.sampling.num_sequences for one in self._open() if one.started)

    @property
    def num_sequences(self) -> int:
        return sum(one.request.sampling.num_sequences for one in self._open())

    def owner_of(self, request_id: str) -> str | None:
        for one in self._open():
            if one.request.request_id == request_id:
                return one.request.owner
        return None

    def open_requests(self) -> list[tuple[Request, bool]]:
        """List every open request, with True if an engine has started it."""
        return [(one.request, one.started) for one in self._open()]
