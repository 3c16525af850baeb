"""Blocks' content in host memory, by hash, under a cap. Imports no torch."""

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
        from_disk: whether it was read from a disk.
    """

    saved: SavedBlock | None = None
    from_disk: bool = False


class HostStore:
    """What a waiting sequence comes back to, and what else there is room for.

    Content that somebody wants stays; before anybody wants some, room for it is reserved. The
    rest goes least recently used first.

    Args:
        capacity: in blocks.
        keeps_unwanted: whether there is a rest: content that left the cache and may be asked for.
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
        """Blocks that left the cache, and that somebody comes back to."""
        return sum(not held.from_disk for held in self._held.values())

    @property
    def room(self) -> int:
        """Blocks that can be reserved."""
        return self.capacity - self._reserved

    def reserve(self, hashes: Iterable[bytes], others: int = 0) -> bool:
        """Want some content, and room for as many blocks beside it; False if there is none."""
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
        """Take a reservation back."""
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
        """Whether content that leaves the cache is to come here."""
        if content in self._held or content in self._spare:
            return False
        return content in self._wanted or (self._keeps_unwanted and self.room > 0)

    def put(self, content: bytes, held: HostBlock) -> None:
        """Keep some content that `takes` said yes to."""
        if content in self._wanted:
            self._held[content] = held
        else:
            self._spare[content] = held
            self._shrink()

    def get(self, content: bytes) -> HostBlock | None:
        """Content by its hash, if it is here."""
        return self._held.get(content) or self._spare.get(content)

    def discard_empty(self) -> None:
        """Forget what was never filled, since the plan that was to do it failed."""
        for store in (self._held, self._spare):
            for content in [key for key, held in store.items() if held.saved is None]:
                del store[content]

    def _shrink(self) -> None:
        while self._spare and len(self._spare) > self.room:
            self._spare.popitem(last=False)

    def check_invariants(self, reservations: Iterator[int]) -> None:
        """Assert that the cap holds and that exactly what is wanted stays.

        Args:
            reservations: blocks of each that was not taken back.
        """
        assert self._reserved == sum(reservations) <= self.capacity
        assert set(self._held) <= set(self._wanted)
        assert not self._wanted.keys() & self._spare.keys()
        assert len(self._held) <= sum(self._wanted.values()) <= self._reserved
        assert len(self) <= self.capacity
