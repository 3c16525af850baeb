"""The adapters in slots; evicts the least recently used one without users."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.nouns.request import AdapterRef, Request
    from appliance.engine.run.adapters.loader import LoadedAdapter
    from appliance.model.adapters.slots import AdapterSlots

AdapterKey = tuple[str, str]  # path and stamp


def key_of(ref: AdapterRef) -> AdapterKey:
    """Return a key that identifies one version of an adapter's files."""
    return ref.path, ref.stamp


@dataclass(slots=True)
class _Resident:
    slot: int
    digest: str
    users: set[str] = field(default_factory=set)  # request ids
    is_unwanted: bool = False  # unloaded, but still in use


class Residents:
    """The slots and their adapters.

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
