"""Keeps the hidden states that a draft head reads, from the step that made them.

These are the served model's states after the last norm, or its residual streams before some layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.native import NativeDecoder

MOST_BYTES = 64 * 2**20  # per layer


def kept_bytes(layers: tuple[int, ...]) -> int:
    """Return the maximum bytes kept for all sequences."""
    return MOST_BYTES * max(1, len(layers))


class HiddenRows:
    """Each sequence's last rows, without gaps.

    Beyond `kept_bytes` drops the oldest rows of the longest sequence.

    Args:
        layers: keeps the streams before these layers, side by side; empty keeps the final states.
    """

    def __init__(self, target: NativeDecoder, layers: tuple[int, ...]) -> None:
        self._target = target
        self._layers = layers
        self._most = max(1, MOST_BYTES // (4 * target.spec.hidden_size))
        self._held: dict[
            Sequence, list[tuple[int, NDArray[np.float32]]]
        ] = {}  # first positions and rows
        self._count = 0

    def run(
        self,
        scheduled: Iterable[ScheduledSequence],
        step: tuple[Tensor, Tensor, RaggedBatch, Any],
        rows: Tensor,
    ) -> Tensor:
        """Run a step of the served model and keep states for the head; see `Executor.hidden`.

        Args:
            step: token ids, positions, batch and cache.
        """
        if self._layers:
            hidden, streams = self._target.recorded(*step, rows, self._layers)
            self._keep(scheduled, streams)
            return hidden
        of_all = self._target.hidden(*step)
        self._keep(scheduled, of_all)
        return of_all.index_select(0, rows)

    def _keep(self, scheduled: Iterable[ScheduledSequence], said: Tensor) -> None:
        """Keep a step's states, (num_tokens, width), overwriting rejected rows."""
        row = 0
        for entry in scheduled:
            rows = said[row : row + entry.num_tokens]
            row += entry.num_tokens
            self._keep_of(entry.sequence, entry.start, rows.clone().numpy())
        while self._count > self._most:
            longest = max(self._held, key=lambda one: sum(len(rows) for _, rows in self._held[one]))
            self._count -= len(self._held[longest].pop(0)[1])
            if not self._held[longest]:
                del self._held[longest]

    def first(self, sequence: Sequence) -> int:
        """Return the first position from which on it keeps all rows."""
        held = self._held.get(sequence)
        return held[0][0] if held else sequence.num_computed

    def of(self, sequence: Sequence, start: int, end: int) -> NDArray[np.float32]:
        """Return the kept rows of positions [start, end)."""
        pieces = [
            rows[max(0, start - first) : max(0, end - first)]
            for first, rows in self._held[sequence]
        ]
        return np.concatenate(pieces)

    def drop_before(self, sequence: Sequence, position: int) -> None:
        """Drop rows that were read, but not the position's own."""
        held = self._held.get(sequence, [])
        while len(held) > 1 and held[1][0] <= position:
            self._count -= len(held.pop(0)[1])

    def end(self, sequence: Sequence) -> None:
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
