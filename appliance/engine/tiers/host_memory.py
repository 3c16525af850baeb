"""Host memory behind the cache: content by hash, under a cap, and a plan's moves there and back.

The content is that of blocks and of state checkpoints. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from appliance.engine.blocks.block_hashes import is_state
from appliance.engine.nouns.moves import BlockLoad, BlockSave, SavedBlock, StateLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


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
        self.keeps_unwanted = keeps_unwanted
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
                if held is not None and self.keeps_unwanted:
                    self._add_spare(content, held)

    def takes(self, content: bytes) -> bool:
        """Return True if it should keep content that leaves the cache."""
        if content in self._held or content in self._spare:
            return False
        fits = self.room_of((content,)) <= self.room
        return content in self._wanted or (self.keeps_unwanted and fits)

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


class Arrival(NamedTuple):
    """A block of the cache that waits for content in host memory, or on its way there.

    Attributes:
        block: or a state's row.
    """

    block: int
    host: HostBlock
    open_block: int = -1
    is_state: bool = False


class PlannedMoves(NamedTuple):
    """A plan's moves to host memory and back: see `Plan` and `StateMoves`."""

    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    state_saves: tuple[int, ...] = ()
    state_loads: tuple[StateLoad, ...] = ()


_NONE = PlannedMoves()


class PlannedSaves:
    """Saves of the plan being made, and the places for the last plan's saves."""

    def __init__(self) -> None:
        self._blocks: list[tuple[BlockSave, HostBlock]] = []
        self._states: list[tuple[int, HostBlock]] = []
        self._coming: list[HostBlock] = []

    def save_block(self, block: int, open_block: int = -1) -> HostBlock:
        """Save a block's content with the plan being made."""
        held = HostBlock()
        self._blocks.append((BlockSave(block, open_block), held))
        return held

    def save_state(self, row: int) -> HostBlock:
        held = HostBlock()
        self._states.append((row, held))
        return held

    def take(self, arrivals: Sequence[Arrival]) -> PlannedMoves:
        """Return the moves of a complete plan."""
        if not (arrivals or self._blocks or self._states):  # the usual case
            self._coming = []
            return _NONE
        self._coming = self._planned
        places = {host: place for place, host in enumerate(self._coming)}
        loads, state_loads = [], []
        for arrival in arrivals:
            source = arrival.host.saved or places[arrival.host]
            if arrival.is_state:
                state_loads.append(StateLoad(arrival.block, source))
            else:
                loads.append(BlockLoad(arrival.block, source, arrival.open_block))
        saves = tuple(save for save, _ in self._blocks)
        rows = tuple(row for row, _ in self._states)
        self._blocks.clear()
        self._states.clear()
        return PlannedMoves(saves, tuple(loads), rows, tuple(state_loads))

    def hold(self, saved: Sequence[SavedBlock]) -> None:
        """Keep the content that the last plan saved."""
        for host, content in zip(self._coming, saved, strict=True):
            host.saved = content
        self._coming = []

    def discard(self) -> None:
        """Drop the places for failed plans."""
        self._coming = []

    def is_lost(self, held: HostBlock | None) -> bool:
        """Return True if a place will never be filled, because its plan failed."""
        return held is not None and held.saved is None and held not in self._planned

    @property
    def _planned(self) -> list[HostBlock]:
        return [host for _, host in (*self._blocks, *self._states)]
