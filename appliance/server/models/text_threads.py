"""Runs work on texts (templates, tokenizers, schemas) in threads, in turn between clients.

Such work takes time in proportion to its texts and cannot be interrupted. So that nobody waits for
another's long texts, one thread takes short work only, and the others take each key's in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from appliance.errors import RequestError
from appliance.long_lived import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

THREADS = 3
SHORT = 16 * 1024  # characters or bytes of short work: some milliseconds
MOST_SECONDS = 60.0  # waiting included: ten times what the longest body takes alone

ResultT = TypeVar("ResultT")


class TextTimeoutError(RequestError):
    """Texts were not read in time; `retry_after` is in seconds."""

    status = 503
    type = "server_error"
    retry_after = 5

    def __init__(self) -> None:
        super().__init__(
            f"a text or picture of this request was not read within {MOST_SECONDS:.0f} s; send"
            " less, or try again later",
            code="text_timeout",
        )


@dataclass(slots=True)
class _Job:
    number: int  # in order of arrival
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


class _Line:
    """Waiting jobs by owner, whose turn comes round."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[_Job]] = OrderedDict()

    def add(self, owner: str, job: _Job) -> None:
        self._of.setdefault(owner, deque()).append(job)

    def first(self) -> _Job | None:
        """Return the job whose turn it is, without those that nobody awaits any more."""
        while self._of:
            owner, jobs = next(iter(self._of.items()))
            while jobs and jobs[0].done.cancelled():
                jobs.popleft()
            if jobs:
                return jobs[0]
            del self._of[owner]
        return None

    def take(self) -> _Job:
        """Remove and return the first job; its owner's next one comes after the others'."""
        owner, jobs = self._of.popitem(last=False)
        job = jobs.popleft()
        if jobs:
            self._of[owner] = jobs
        return job


class TextThreads:
    """A few threads, started on demand.

    Args:
        threads: at least two; one of them takes short work only.
    """

    def __init__(self, threads: int = THREADS) -> None:
        assert threads > 1
        self._threads = threads
        self._started: list[threading.Thread] = []
        self._short, self._long = _Line(), _Line()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    async def run(self, work: Callable[[], ResultT], *, owner: str, size: int) -> ResultT:
        """Run work in a thread.

        Args:
            owner: name of the API key that it is for.
            size: characters or bytes that it reads.

        Raises:
            TextTimeoutError: it did not end in time.
        """
        job = _Job(next(self._numbers), work)
        with self._changed:
            (self._short if size <= SHORT else self._long).add(owner, job)
            self._start()
            self._changed.notify_all()
        try:
            async with asyncio.timeout(MOST_SECONDS):
                found: ResultT = await asyncio.wrap_future(job.done)
                return found
        except TimeoutError as error:
            raise TextTimeoutError from error

    def close(self) -> None:
        """End the threads after their current work; what waits is not done."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        """Start the threads; the first takes short work only."""
        while len(self._started) < self._threads:
            work = partial(self._serve, not self._started)
            self._started.append(start_thread(work, f"text-{len(self._started)}"))

    def _serve(self, only_short: bool) -> None:
        while (job := self._next(only_short)) is not None:
            if not job.done.set_running_or_notify_cancel():
                continue
            try:
                job.done.set_result(job.work())
            except BaseException as error:  # also a panic of the tokenizers library
                job.done.set_exception(error)
            del job  # not held while waiting for the next one

    def _next(self, only_short: bool) -> _Job | None:
        with self._changed:
            while not self._closed:
                line = self._line(only_short)
                if line is not None:
                    return line.take()
                self._changed.wait()
        return None

    def _line(self, only_short: bool) -> _Line | None:
        """Return the line to serve: of two, the one whose first job came earlier."""
        lines = [self._short] if only_short else [self._short, self._long]
        waiting = [(job.number, line) for line in lines if (job := line.first()) is not None]
        return min(waiting, key=lambda one: one[0])[1] if waiting else None
