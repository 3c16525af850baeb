"""Holds requests until their adapter is in a slot, and reads the next adapter.

A request keeps its slot until its end. No request overtakes one that has waited long, so slots
become free.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.grammars.grammars import refusal
from appliance.engine.nouns.messages import AdapterAnswer
from appliance.engine.scheduling.deadlines import overdue
from appliance.errors import AdapterError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from appliance.engine.nouns.messages import SequenceDelta
    from appliance.engine.nouns.request import AdapterRef, Request
    from appliance.engine.run.adapters.loader import AdapterLoader, LoadedAdapter
    from appliance.model.adapters.adapter import AdapterSlots


AdapterKey = tuple[str, str]  # path and stamp
PATIENCE = 1.0  # seconds for which a request lets later ones overtake it
_WAIT_SECONDS = 0.01  # between checks for other events


class AdapterPool:
    """Adapters in slots, and the requests that wait for one.

    Args:
        loader: reads adapters, and has the executor's slots.
        live: returns the ids of the open requests.
    """

    def __init__(
        self,
        loader: AdapterLoader,
        live: Callable[[], set[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loader = loader
        self._clock = clock
        self.residents = Residents(loader.slots, loader.count, live)
        self._held: list[_Held] = []
        self._wished: list[AdapterRef] = []  # requested by an administrator
        self._loading: tuple[AdapterRef, Future[LoadedAdapter]] | None = None
        self._answers: list[AdapterAnswer] = []

    @property
    def waiting(self) -> int:
        return len(self._held)

    @property
    def is_busy(self) -> bool:
        return bool(self._held or self._loading or self._wished or self._answers)

    def take(self, request: Request) -> Request | None:
        """Return a request with its slot filled in; None if it has to wait here."""
        assert request.adapter is not None
        if not self.residents.serves(request.adapter) or self._is_barred(self._clock()):
            self._held.append(_Held(request, self._clock()))
            return None
        return self.residents.use(request)

    def abandon(self, request_id: str) -> bool:
        """Forget a waiting request; return False if it is not here."""
        before = len(self._held)
        self._held = [one for one in self._held if one.request.request_id != request_id]
        return len(self._held) < before

    def install(self, ref: AdapterRef) -> None:
        """Read an adapter before the first request, and put it into a free slot, if any."""
        loaded = self._loader.load(ref)
        if self.residents.has_free_slot:
            self.residents.put(ref, loaded)

    def wish(self, ref: AdapterRef) -> None:
        """Load an adapter for an administrator; `take_answers` has the result."""
        self._wished.append(ref)

    def unload(self, ref: AdapterRef) -> None:
        """Empty an adapter's slot once no request uses it."""
        self.residents.unload(ref)

    def start(self, now: float) -> tuple[list[Request], list[SequenceDelta]]:
        """Release requests whose adapter is in a slot, and begin to load the next one.

        Returns:
            Requests for the scheduler, and the final deltas of refused ones.
        """
        ends = self._finish_loading()
        self._answer_wishes()
        self.residents.drop_unwanted()
        self._begin_loading()  # before requests leave, as they are not live yet
        waiting = []
        for one in self._held:
            late = overdue(one.request, one.since, now)
            ends += late
            if not late:
                waiting.append(one)
        self._held = waiting
        ready: list[Request] = []
        for one in list(self._held):
            assert one.request.adapter is not None
            if self.residents.serves(one.request.adapter):
                self._held.remove(one)
                ready.append(self.residents.use(one.request))
            elif now - one.since > PATIENCE:
                break
        return ready, ends

    def idle(self) -> bool:
        """Wait briefly for the adapter being read; return False if there is none."""
        if self._loading is None:
            return False
        wait([self._loading[1]], _WAIT_SECONDS)
        return True

    def take_answers(self) -> tuple[AdapterAnswer, ...]:
        answers, self._answers = tuple(self._answers), []
        return answers

    def close(self) -> None:
        self._loader.close()

    def _is_barred(self, now: float) -> bool:
        return bool(self._held) and now - self._held[0].since > PATIENCE

    def _begin_loading(self) -> None:
        """Read the next wanted adapter if a slot is free or can be emptied."""
        if self._loading is not None:
            return
        can_be_put = self.residents.has_room
        wanted = [*self._wished, *(one.request.adapter for one in self._held)]
        for ref in wanted:
            if ref is None or key_of(ref) in self.residents:
                continue
            if can_be_put or ref in self._wished:
                self._loading = ref, self._loader.begin(ref)
            return

    def _finish_loading(self) -> list[SequenceDelta]:
        """Put a read adapter into a slot; return the final deltas of requests that it failed."""
        if self._loading is None or not self._loading[1].done():
            return []
        ref, future = self._loading
        failure = future.exception()
        if failure is None and self.residents.has_room:
            self.residents.put(ref, future.result())
            self._loading = None
            return []
        if failure is None:  # no free slot: answer that it is valid
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
        return [refusal(one.request, error) for one in failed]

    def _answer_wishes(self, sound: AdapterRef | None = None, error: str = "") -> None:
        """Answer administrators for adapters in slots, and for one just read."""
        for ref in list(self._wished):
            if key_of(ref) in self.residents or (
                sound is not None and key_of(ref) == key_of(sound)
            ):
                self._wished.remove(ref)
                self._answers.append(AdapterAnswer(ref, error))


class Residents:
    """The slots and their adapters; evicts the least recently used one without users.

    Args:
        live: returns the ids of the open requests.
    """

    def __init__(self, slots: AdapterSlots, count: int, live: Callable[[], set[str]]) -> None:
        self._slots = slots
        self._live = live
        self._free = list(range(count - 1, -1, -1))
        self._residents: OrderedDict[AdapterKey, _Resident] = OrderedDict()  # most recent last

    def __contains__(self, key: AdapterKey) -> bool:
        return key in self._residents

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    @property
    def has_room(self) -> bool:
        return bool(self._free) or self._victim() is not None

    def serves(self, ref: AdapterRef) -> bool:
        """Return True if a slot holds the adapter and nobody unloaded it."""
        resident = self._residents.get(key_of(ref))
        return resident is not None and not resident.is_unwanted

    def use(self, request: Request) -> Request:
        """Return a request with its adapter's slot, which it keeps until its end."""
        ref = request.adapter
        assert ref is not None
        resident = self._residents[key_of(ref)]
        resident.users.add(request.request_id)
        self._residents.move_to_end(key_of(ref))
        ref = msgspec.structs.replace(ref, digest=resident.digest, slot=resident.slot)
        return msgspec.structs.replace(request, adapter=ref)

    def put(self, ref: AdapterRef, loaded: LoadedAdapter) -> None:
        """Put an adapter into a slot; call it only if `has_room`."""
        if not self._free:
            victim = self._victim()
            assert victim is not None
            self._drop(victim)
        slot = self._free.pop()
        self._slots.put(slot, loaded.laid_out)
        self._residents[key_of(ref)] = _Resident(slot, loaded.digest)

    def unload(self, ref: AdapterRef) -> None:
        """Empty an adapter's slot once no request uses it, now or in `drop_unwanted`."""
        resident = self._residents.get(key_of(ref))
        if resident is not None:
            resident.is_unwanted = True
            self.drop_unwanted()

    def drop_unwanted(self) -> None:
        """Empty the slots of unloaded adapters that no request uses any more."""
        for key, resident in list(self._residents.items()):
            if resident.is_unwanted and not self._in_use(resident):
                self._drop(key)

    def _victim(self) -> AdapterKey | None:
        return next((key for key, one in self._residents.items() if not self._in_use(one)), None)

    def _in_use(self, resident: _Resident) -> bool:
        resident.users &= self._live()
        return bool(resident.users)

    def _drop(self, key: AdapterKey) -> None:
        resident = self._residents.pop(key)
        self._slots.put(resident.slot, None)
        self._free.append(resident.slot)


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    since: float


@dataclass(slots=True)
class _Resident:
    slot: int
    digest: str
    users: set[str] = field(default_factory=set)  # request ids
    is_unwanted: bool = False  # unloaded, but still in use


def key_of(ref: AdapterRef) -> AdapterKey:
    """Return a key that identifies one version of an adapter's files."""
    return ref.path, ref.stamp


def _same(request: Request, ref: AdapterRef) -> bool:
    return request.adapter is not None and key_of(request.adapter) == key_of(ref)
