"""The adapters in slots, and the requests that wait for one; the least recently used makes room.

A request is let on to the scheduler once its adapter is in a slot, and keeps it there until its
end. One that waits long lets no later one overtake it, so that slots become free.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.messages import AdapterAnswer, SequenceDelta
from appliance.engine.request import FinishReason
from appliance.engine.scheduling.deadlines import why_refused
from appliance.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from appliance.engine.adapters.loader import AdapterLoader, LoadedAdapter
    from appliance.engine.request import AdapterRef, Request

PATIENCE = 1.0  # seconds that a request lets later ones overtake it
_WAIT_SECONDS = 0.01  # between checks for other events
_Key = tuple[str, str]  # path and stamp


@dataclass(slots=True)
class _Resident:
    slot: int
    digest: str
    users: set[str] = field(default_factory=set)  # request ids
    is_unwanted: bool = False  # unloaded, but in use


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    since: float


class AdapterPool:
    """The slots, what lies in them, and who waits.

    Args:
        loader: reads adapters, and has the executor's slots.
        live: returns the ids of the requests that have not ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        loader: AdapterLoader,
        live: Callable[[], set[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = loader.slots
        self._loader = loader
        self._live = live
        self._clock = clock
        self._free = list(range(loader.count - 1, -1, -1))
        self._residents: OrderedDict[_Key, _Resident] = OrderedDict()  # the latest used last
        self._held: list[_Held] = []
        self._wished: list[AdapterRef] = []  # by an administrator, without a request
        self._loading: tuple[AdapterRef, Future[LoadedAdapter]] | None = None
        self._answers: list[AdapterAnswer] = []

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their adapter."""
        return len(self._held)

    @property
    def is_busy(self) -> bool:
        """True if something is to be done here."""
        return bool(self._held or self._loading or self._wished or self._answers)

    def take(self, request: Request) -> Request | None:
        """Return a request with its slot filled in, or None: then it waits here."""
        assert request.adapter is not None
        resident = self._residents.get(_key(request.adapter))
        if resident is None or resident.is_unwanted or self._is_barred(self._clock()):
            self._held.append(_Held(request, self._clock()))
            return None
        return self._use(request, resident)

    def abandon(self, request_id: str) -> bool:
        """Forget a waiting request; return False if it does not wait here."""
        before = len(self._held)
        self._held = [one for one in self._held if one.request.request_id != request_id]
        return len(self._held) < before

    def install(self, ref: AdapterRef) -> None:
        """Read an adapter before the first request; it gets a slot if there is a free one.

        Raises:
            AdapterError: it cannot be used.
        """
        loaded = self._loader.load(ref)
        if self._free:
            self._put(ref, loaded)

    def wish(self, ref: AdapterRef) -> None:
        """Load an adapter for an administrator, who gets an answer."""
        self._wished.append(ref)

    def unload(self, ref: AdapterRef) -> None:
        """Empty an adapter's slot once nobody uses it."""
        resident = self._residents.get(_key(ref))
        if resident is not None:
            resident.is_unwanted = True
            self._drop_unwanted()

    def start(self, now: float) -> tuple[list[Request], list[SequenceDelta]]:
        """Let on the requests whose adapter is there, and begin to load the next one.

        Returns:
            Requests for the scheduler, and the ends of refused ones.
        """
        ends = self._finish_loading()
        self._answer_wishes()
        self._drop_unwanted()
        self._begin_loading()  # before any is let on, who would not be live yet
        ends += [self._late(one, now) for one in self._held if _is_late(one, now)]
        self._held = [one for one in self._held if not _is_late(one, now)]
        ready: list[Request] = []
        for one in list(self._held):
            assert one.request.adapter is not None
            resident = self._residents.get(_key(one.request.adapter))
            if resident is not None and not resident.is_unwanted:
                self._held.remove(one)
                ready.append(self._use(one.request, resident))
            elif now - one.since > PATIENCE:
                break
        return ready, ends

    def idle(self) -> bool:
        """Wait a moment for an adapter that is being read; False if none is."""
        if self._loading is None:
            return False
        wait([self._loading[1]], _WAIT_SECONDS)
        return True

    def take_answers(self) -> tuple[AdapterAnswer, ...]:
        """Return what administrators are told, once."""
        answers, self._answers = tuple(self._answers), []
        return answers

    def close(self) -> None:
        self._loader.close()

    def _is_barred(self, now: float) -> bool:
        return bool(self._held) and now - self._held[0].since > PATIENCE

    def _use(self, request: Request, resident: _Resident) -> Request:
        ref = request.adapter
        assert ref is not None
        resident.users.add(request.request_id)
        self._residents.move_to_end(_key(ref))
        ref = msgspec.structs.replace(ref, digest=resident.digest, slot=resident.slot)
        return msgspec.structs.replace(request, adapter=ref)

    def _begin_loading(self) -> None:
        """Read the next adapter that is wanted, if there is or can be a slot for it."""
        if self._loading is not None:
            return
        can_be_put = bool(self._free) or self._victim() is not None
        wanted = [*self._wished, *(one.request.adapter for one in self._held)]
        for ref in wanted:
            if ref is None or _key(ref) in self._residents:
                continue
            if can_be_put or ref in self._wished:
                self._loading = ref, self._loader.begin(ref)
            return

    def _finish_loading(self) -> list[SequenceDelta]:
        """Give an adapter that has been read its slot; return the ends of those it failed."""
        if self._loading is None or not self._loading[1].done():
            return []
        ref, future = self._loading
        failure = future.exception()
        if failure is None and (self._free or self._victim() is not None):
            self._put(ref, future.result())
            self._loading = None
            return []
        if failure is None:  # all slots are in use: whoever wished it learns that it is sound
            self._answer_wishes(ref)
            if not any(_same(one.request, ref) for one in self._held):
                self._loading = None
            return []
        self._loading = None
        if not isinstance(failure, AdapterError | MemoryError):
            raise failure
        error = str(failure) or "the system has no memory for this adapter"
        self._answer_wishes(ref, error)
        failed = [one for one in self._held if _same(one.request, ref)]
        self._held = [one for one in self._held if one not in failed]
        return [_end(one.request, error, refused=True) for one in failed]

    def _answer_wishes(self, sound: AdapterRef | None = None, error: str = "") -> None:
        """Tell administrators of adapters in slots, and of one that was read."""
        for ref in list(self._wished):
            if _key(ref) in self._residents or (sound is not None and _key(ref) == _key(sound)):
                self._wished.remove(ref)
                self._answers.append(AdapterAnswer(ref, error))

    def _put(self, ref: AdapterRef, loaded: LoadedAdapter) -> None:
        if not self._free:
            victim = self._victim()
            assert victim is not None
            self._drop(victim)
        slot = self._free.pop()
        self._slots.put(slot, loaded.laid_out)
        self._residents[_key(ref)] = _Resident(slot, loaded.digest)

    def _victim(self) -> _Key | None:
        """Return the least recently used adapter that nobody uses."""
        return next((key for key, one in self._residents.items() if not self._in_use(one)), None)

    def _in_use(self, resident: _Resident) -> bool:
        resident.users &= self._live()
        return bool(resident.users)

    def _drop(self, key: _Key) -> None:
        resident = self._residents.pop(key)
        self._slots.put(resident.slot, None)
        self._free.append(resident.slot)

    def _drop_unwanted(self) -> None:
        for key, resident in list(self._residents.items()):
            if resident.is_unwanted and not self._in_use(resident):
                self._drop(key)

    @staticmethod
    def _late(held: _Held, now: float) -> SequenceDelta:
        return _end(held.request, why_refused(held.request, now - held.since), expired=True)


def _key(ref: AdapterRef) -> _Key:
    return ref.path, ref.stamp


def _same(request: Request, ref: AdapterRef) -> bool:
    return request.adapter is not None and _key(request.adapter) == _key(ref)


def _is_late(held: _Held, now: float) -> bool:
    limits = (held.request.timeout, held.request.max_queue_seconds)
    return any(limit is not None and now - held.since > limit for limit in limits)


def _end(
    request: Request, error: str, *, refused: bool = False, expired: bool = False
) -> SequenceDelta:
    return SequenceDelta(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=error,
        refused=refused,
        expired=expired,
    )
