"""Holds requests until their pictures are encoded, so that no step waits for a tower."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.scheduling.deadlines import overdue
from appliance.errors import ApplianceError
from appliance.stats import SequenceView

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.nouns.picture import CanvasPixels
    from appliance.engine.nouns.request import Request
    from appliance.engine.run.encoded_pictures import EncodedPictures
    from appliance.model.vision.tower import PictureRows
    from appliance.stats import EngineStats

_NICENESS = 5  # a third of what a thread of running answers gets of a processor they share
_WAIT_SECONDS = 0.01  # between checks for other events


@dataclass(slots=True)
class HeldRequest:
    """A request that waits.

    Attributes:
        error: why it cannot be served; None as long as it can.
    """

    request: Request
    arrival: float
    missing: set[bytes]
    error: str | None = field(default=None)


class PictureQueue:
    """Encodes pictures in the order of their requests.

    On a CPU a thread of lower priority does, beside the steps of running answers. On a GPU each
    step is preceded by one picture.

    Args:
        encode: runs the tower; safe in any thread.
        beside_steps: encodes in a thread.
    """

    def __init__(
        self,
        encode: Callable[[CanvasPixels], PictureRows],
        encoded: EncodedPictures,
        *,
        beside_steps: bool,
    ) -> None:
        self.encoded = encoded
        self.seconds = 0.0  # spent encoding
        self.encode = encode
        self._held: dict[str, HeldRequest] = {}
        self._waiting: dict[bytes, CanvasPixels] = {}  # to encode in this thread
        self._running: dict[bytes, Future[tuple[PictureRows, float]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        if beside_steps:
            self._thread = ThreadPoolExecutor(1, "pictures", initializer=_give_way)

    @property
    def waiting(self) -> int:
        return len(self._held)

    def held(self) -> set[str]:
        return set(self._held)

    def hold(
        self,
        request: Request,
        arrival: float,
        num_cached: Callable[[Request], int] | None = None,
    ) -> bool:
        """Hold a request until its pictures are encoded; return False if they are.

        Args:
            arrival: see `Scheduler.stamp`.
            num_cached: see `EncodedPictures.missing`.
        """
        missing = {canvas.key: canvas for canvas in self.encoded.missing(request, num_cached)}
        if not missing:
            return False
        self._held[request.request_id] = HeldRequest(request, arrival, set(missing))
        for key, canvas in missing.items():
            if key in self._running or key in self._waiting:
                continue
            if self._thread is None:
                self._waiting[key] = canvas
            else:
                self._running[key] = self._thread.submit(self._timed, canvas)
        return True

    def abandon(self, request_id: str) -> bool:
        """Forget a waiting request; return False if it is not here."""
        if self._held.pop(request_id, None) is None:
            return False
        self.encoded.forget(request_id)
        wanted = set[bytes]().union(*(one.missing for one in self._held.values()))
        for key in self._waiting.keys() - wanted:
            del self._waiting[key]
        for key in self._running.keys() - wanted:
            if self._running[key].cancel():
                del self._running[key]
        return True

    def late(self, now: float) -> list[SequenceDelta]:
        """Forget the requests that have waited too long, and return their final deltas."""
        found: list[SequenceDelta] = []
        for name, one in list(self._held.items()):
            if ends := overdue(one.request, one.arrival, now):
                found += ends
                self.abandon(name)
        return found

    def take(self) -> list[HeldRequest]:
        """Return the requests whose pictures are encoded, or cannot be."""
        if self._waiting:
            key, canvas = next(iter(self._waiting.items()))
            del self._waiting[key]
            done: Future[tuple[PictureRows, float]] = Future()
            try:
                done.set_result(self._timed(canvas))
            except (ApplianceError, MemoryError) as error:
                done.set_exception(error)
            self._running[key] = done
        for key in [key for key, future in self._running.items() if future.done()]:
            self._arrived(key, self._running.pop(key))
        ready = [one for one in self._held.values() if one.error or not one.missing]
        for one in ready:
            del self._held[one.request.request_id]
        return ready

    def _arrived(self, key: bytes, future: Future[tuple[PictureRows, float]]) -> None:
        error = None
        try:
            rows, seconds = future.result()
            self.encoded.put(key, rows)
            self.seconds += seconds
        except MemoryError as failure:
            error = f"a picture needs more memory than there is: {failure}; send a smaller one"
        except ApplianceError as failure:
            error = str(failure)
        for one in self._held.values():
            if key in one.missing:
                one.missing.discard(key)
                one.error = one.error or error

    def _timed(self, canvas: CanvasPixels) -> tuple[PictureRows, float]:
        begin = time.perf_counter()
        return self.encode(canvas), time.perf_counter() - begin

    def idle(self) -> bool:
        """Wait for a picture while nothing runs; return False if there is none."""
        if self._running:
            wait(self._running.values(), _WAIT_SECONDS, FIRST_COMPLETED)
        return bool(self._held)

    def add_stats(self, stats: EngineStats) -> EngineStats:
        """Add what was encoded to a snapshot."""
        return msgspec.structs.replace(
            stats,
            pictures_encoded_total=self.encoded.num_encoded,
            picture_hits_total=self.encoded.num_hits,
            picture_seconds_total=self.seconds,
            picture_bytes=self.encoded.num_bytes,
        )

    def views(self, now: float) -> tuple[SequenceView, ...]:
        """Describe the waiting requests for dashboards, each as one sequence.

        Args:
            now: on the clock of their arrival.
        """
        return tuple(_view(one.request, now - one.arrival) for one in self._held.values())

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def _view(request: Request, age: float) -> SequenceView:
    assert request.pictures is not None
    return SequenceView(
        request_id=request.request_id,
        index=0,
        slot=0,
        owner=request.owner,
        adapter="" if request.adapter is None else request.adapter.name,
        status="encoding",
        prompt_tokens=len(request.prompt_token_ids),
        picture_rows=request.pictures.num_rows,
        cached_tokens=0,
        output_tokens=0,
        blocks=0,
        age_seconds=age,
    )


def _give_way() -> None:
    """Lower the priority of the calling thread, and of those that it starts."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:  # where threads have none of their own
        return
