"""Keeps blocks and state checkpoints in host memory, by hash, under a cap. Imports no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_hashes import is_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from appliance.engine.nouns.moves import SavedBlock


@dataclass(slots=True, eq=False)
class HostBlock:
    """Place for a block's content.

    Attributes:
        saved: the content; None until the plan that saves it is launched.
    """

    saved: SavedBlock | None = None
    from_disk: bool = False


class HostStore:
    """Content to which waiting sequences return, and other content while there is room.

    Reserves room for wanted content in advance and keeps it. Drops other content least recently
    used first.

    Args:
        capacity: in blocks.
        keeps_unwanted: also keep evicted content that no sequence waits for.
        state_room: blocks that a state checkpoint takes.
    """

    def __init__(self, capacity: int, *, keeps_unwanted: bool = False, state_room: int = 0) -> None:
        self.capacity = capacity
        self._state_room = state_room
        self._keeps_unwanted = keeps_unwanted
        self._reserved = 0
        self._wanted: Counter[bytes] = Counter()
        self._held: dict[bytes, HostBlock] = {}  # wanted
        self._spare: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first
        self._spare_room = 0  # room of these

    def __len__(self) -> int:
        return self.room_of(self._held) + self._spare_room

    @property
    def num_swapped(self) -> int:
        """Blocks that left the cache and to which a sequence returns."""
        mine = (content for content, held in self._held.items() if not held.from_disk)
        return self.room_of(mine)

    @property
    def room(self) -> int:
        return self.capacity - self._reserved

    def room_of(self, hashes: Iterable[bytes]) -> int:
        return sum([self._state_room if is_state(one) else 1 for one in hashes])

    def reserve(self, hashes: Iterable[bytes], others: int = 0) -> bool:
        """Reserve room for some content and for other blocks; return False if it does not fit."""
        wanted = list(hashes)
        room = self.room_of(wanted) + others
        if room > self.room:
            return False
        self._reserved += room
        self._wanted.update(wanted)
        for content in wanted:
            if content in self._spare:
                self._held[content] = self._take_spare(content)
        self._shrink()
        return True

    def release(self, hashes: Iterable[bytes], others: int = 0) -> None:
        released = list(hashes)
        self._reserved -= self.room_of(released) + others
        for content in released:
            self._wanted[content] -= 1
            if self._wanted[content] == 0:
                del self._wanted[content]
                held = self._held.pop(content, None)
                if held is not None and self._keeps_unwanted:
                    self._add_spare(content, held)

    def takes(self, content: bytes) -> bool:
        """Return True if it should keep content that leaves the cache."""
        if content in self._held or content in self._spare:
            return False
        fits = self.room_of((content,)) <= self.room
        return content in self._wanted or (self._keeps_unwanted and fits)

    def put(self, content: bytes, held: HostBlock) -> None:
        if content in self._wanted:
            self._held[content] = held
        else:
            self._add_spare(content, held)
            self._shrink()

    def get(self, content: bytes) -> HostBlock | None:
        return self._held.get(content) or self._spare.get(content)

    def discard_empty(self) -> None:
        """Drop places that were never filled, because their plan failed."""
        for content in [key for key, held in self._held.items() if held.saved is None]:
            del self._held[content]
        for content in [key for key, held in self._spare.items() if held.saved is None]:
            self._take_spare(content)

    def _add_spare(self, content: bytes, held: HostBlock) -> None:
        self._spare[content] = held
        self._spare_room += self.room_of((content,))

    def _take_spare(self, content: bytes) -> HostBlock:
        self._spare_room -= self.room_of((content,))
        return self._spare.pop(content)

    def _shrink(self) -> None:
        while self._spare_room > self.room:
            self._take_spare(next(iter(self._spare)))

    def check_invariants(self, reservations: Iterator[int]) -> None:
        """Assert that the cap holds and that exactly the wanted content stays.

        Args:
            reservations: blocks of each open reservation.
        """
        assert self._reserved == sum(reservations) <= self.capacity
        assert set(self._held) <= set(self._wanted)
        assert not self._wanted.keys() & self._spare.keys()
        assert self.room_of(self._held) <= self.room_of(self._wanted.elements()) <= self._reserved
        assert self._spare_room == self.room_of(self._spare)
        assert len(self) <= self.capacity
