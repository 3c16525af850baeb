"""Sequences that hold no blocks, in the order of rank. Imports no torch."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from appliance.engine.policy import Rank, rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.sequence import Sequence


class WaitingQueue:
    """A priority queue from which anyone may leave, with siblings parked beside it.

    Siblings share their parent's prompt, so they queue only once it is computed.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._queued: set[Sequence] = set()  # the heap may still hold some that left
        self._parked: dict[Sequence, list[Sequence]] = {}  # by parent

    def __len__(self) -> int:
        return len(self._queued) + sum(map(len, self._parked.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._queued
        for siblings in self._parked.values():
            yield from siblings

    def push(self, sequence: Sequence) -> None:
        """Queue a sequence at its rank."""
        self._queued.add(sequence)
        heapq.heappush(self._heap, (rank(sequence), sequence))

    def peek(self) -> Sequence | None:
        """The next one, which stays; None if there is none."""
        while self._heap and self._heap[0][1] not in self._queued:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, queued or parked."""
        if sequence in self._queued:
            self._queued.remove(sequence)
        else:
            assert sequence.parent is not None
            self._parked[sequence.parent].remove(sequence)

    def park(self, parent: Sequence, siblings: list[Sequence]) -> None:
        """Keep siblings until their parent's prompt is computed."""
        self._parked[parent] = siblings

    def unpark(self, parent: Sequence) -> None:
        """Queue the siblings of a sequence that has computed its prompt, or never will."""
        for sibling in self._parked.pop(parent, ()):
            self.push(sibling)
