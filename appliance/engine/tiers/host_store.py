"""Keeps blocks in host memory, by hash, under a cap. Imports no torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from appliance.engine.moves import SavedBlock


@dataclass(slots=True, eq=False)
class HostBlock:
    """A place for the content of a block.

    Attributes:
        saved: the content; None until the plan that saves it is launched.
        from_disk: it was read from disk.
    """

    saved: SavedBlock | None = None
    from_disk: bool = False


class HostStore:
    """Content that waiting sequences come back to, and other content while there is room.

    Wanted content stays, and room for it is reserved in advance. Other content is dropped least
    recently used first.

    Args:
        capacity: in blocks.
        keeps_unwanted: also keep evicted content that nobody wants yet.
    """

    def __init__(self, capacity: int, *, keeps_unwanted: bool = False) -> None:
        self.capacity = capacity
        self._keeps_unwanted = keeps_unwanted
        self._reserved = 0
        self._wanted: Counter[bytes] = Counter()
        self._held: dict[bytes, HostBlock] = {}  # wanted
        self._spare: OrderedDict[bytes, HostBlock] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held) + len(self._spare)

    @property
    def num_swapped(self) -> int:
        """Blocks that left the cache and that a sequence comes back to."""
        return sum(not held.from_disk for held in self._held.values())

    @property
    def room(self) -> int:
        """Blocks that can still be reserved."""
        return self.capacity - self._reserved

    def reserve(self, hashes: Iterable[bytes], others: int = 0) -> bool:
        """Reserve room for some content and for other blocks; return False if it does not fit."""
        wanted = list(hashes)
        if len(wanted) + others > self.room:
            return False
        self._reserved += len(wanted) + others
        self._wanted.update(wanted)
        for content in wanted:
            if content in self._spare:
                self._held[content] = self._spare.pop(content)
        self._shrink()
        return True

    def release(self, hashes: Iterable[bytes], others: int = 0) -> None:
        """Release a reservation."""
        self._reserved -= others
        for content in hashes:
            self._reserved -= 1
            self._wanted[content] -= 1
            if self._wanted[content] == 0:
                del self._wanted[content]
                held = self._held.pop(content, None)
                if held is not None and self._keeps_unwanted:
                    self._spare[content] = held

    def takes(self, content: bytes) -> bool:
        """Return True if content that leaves the cache should be kept here."""
        if content in self._held or content in self._spare:
            return False
        return content in self._wanted or (self._keeps_unwanted and self.room > 0)

    def put(self, content: bytes, held: HostBlock) -> None:
        """Keep content that `takes` accepted."""
        if content in self._wanted:
            self._held[content] = held
        else:
            self._spare[content] = held
            self._shrink()

    def get(self, content: bytes) -> HostBlock | None:
        """Return content by its hash, or None."""
        return self._held.get(content) or self._spare.get(content)

    def discard_empty(self) -> None:
        """Drop places that were never filled, because their plan failed."""
        for store in (self._held, self._spare):
            for content in [key for key, held in store.items() if held.saved is None]:
                del store[content]

    def _shrink(self) -> None:
        while self._spare and len(self._spare) > self.room:
            self._spare.popitem(last=False)

    def check_invariants(self, reservations: Iterator[int]) -> None:
        """Assert that the cap holds and that exactly the wanted content stays.

        `reservations` are the blocks of each open reservation.
        """
        assert self._reserved == sum(reservations) <= self.capacity
        assert set(self._held) <= set(self._wanted)
        assert not self._wanted.keys() & self._spare.keys()
        assert len(self._held) <= sum(self._wanted.values()) <= self._reserved
        assert len(self) <= self.capacity
