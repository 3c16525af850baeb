"""Keeps the hidden states of rows that a step has run, until a head that drafts reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.plan import ScheduledSequence
    from appliance.engine.sequence import Sequence

MOST_BYTES = 64 * 2**20


def most_rows(hidden_size: int) -> int:
    """Return how many rows are kept of all sequences."""
    return max(1, MOST_BYTES // (4 * hidden_size))


class HiddenRows:
    """The latest hidden states of each sequence, without gaps.

    Args:
        most: rows of all sequences; beyond that the oldest of the longest go.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[
            Sequence, list[tuple[int, NDArray[np.float32]]]
        ] = {}  # first positions and rows
        self._count = 0

    def keep(self, scheduled: Iterable[ScheduledSequence], hidden: Tensor) -> None:
        """Keep what a step said, (num_tokens, hidden_size); rejected rows are overwritten."""
        row = 0
        for entry in scheduled:
            rows = hidden[row : row + entry.num_tokens]
            row += entry.num_tokens
            self._keep_of(entry.sequence, entry.start, rows.clone().numpy())
        while self._count > self._most:
            longest = max(self._held, key=lambda one: sum(len(rows) for _, rows in self._held[one]))
            self._count -= len(self._held[longest].pop(0)[1])
            if not self._held[longest]:
                del self._held[longest]

    def first(self, sequence: Sequence) -> int:
        """Return the first position from which on all rows are kept."""
        held = self._held.get(sequence)
        return held[0][0] if held else sequence.num_computed

    def of(self, sequence: Sequence, start: int, end: int) -> NDArray[np.float32]:
        """Return the rows of positions [start, end), which are kept."""
        pieces = [
            rows[max(0, start - first) : max(0, end - first)]
            for first, rows in self._held[sequence]
        ]
        return np.concatenate(pieces)

    def drop_before(self, sequence: Sequence, position: int) -> None:
        """Drop rows that were read; at least that of the position stays."""
        held = self._held.get(sequence, [])
        while len(held) > 1 and held[1][0] <= position:
            self._count -= len(held.pop(0)[1])

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        self._count -= sum(len(rows) for _, rows in self._held.pop(sequence, []))

    def _keep_of(self, sequence: Sequence, start: int, rows: NDArray[np.float32]) -> None:
        held = self._held.pop(sequence, [])
        self._count -= sum(len(one) for _, one in held)
        kept = [(first, one[: start - first]) for first, one in held if first < start]
        if kept and kept[-1][0] + len(kept[-1][1]) < start:
            kept = []
        kept.append((start, rows))
        self._held[sequence] = kept
        self._count += sum(len(one) for _, one in kept)
