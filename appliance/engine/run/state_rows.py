"""Copies recurrent states: among a cache's rows, to host memory and back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.nouns.moves import SavedBlock
from appliance.engine.run.block_moves import PinnedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.engine.nouns.moves import Rates, StateCopy, StateLoad
    from appliance.engine.run.device import Copy, Device
    from appliance.model.fallback.own_cache import OwnCaches


class StateRows:
    """The rows of recurrent state on one device; moves run in call order.

    Args:
        rows: (num_rows, state_bytes) uint8, which steps read and write.
    """

    def __init__(self, rows: Tensor, device: Device, rates: Rates) -> None:
        self.state_bytes = rows.shape[1]
        self._rows = device.view(rows)
        self._device = device
        self._rates = rates
        self._pinned = PinnedRows(device, self.state_bytes)

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a saved row."""
        return (self.state_bytes,)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        for source, destination in copies:
            self._rows[destination].copy_(self._rows[source])

    def forget(self, rows: Sequence[int]) -> None:
        """Do nothing for rows that sequences left: their memory is there for the next ones."""

    def save(self, rows: Sequence[int]) -> tuple[SavedBlock, ...]:
        """Copy rows to host memory; on an asynchronous device later work waits for it."""
        return tuple(map(self._save, rows))

    def load(self, loads: Sequence[StateLoad], saved: Sequence[SavedBlock]) -> None:
        """Fill rows; `saved` is the result of the same plan's `save`."""
        for load in loads:
            content = load.content(saved)
            if not self._device.is_asynchronous:
                content.read()
            source = self._device.view(np.frombuffer(_writable(content.content), dtype=np.uint8))
            self._device.send_aside([source], self._rows[load.row : load.row + 1])

    def _save(self, row: int) -> SavedBlock:
        if not self._device.is_asynchronous:
            begin = time.perf_counter()
            content = self._rows[row].numpy().tobytes()
            self._rates.saw_moves(len(content), time.perf_counter() - begin)
            return SavedBlock(content)
        place, view = self._pinned.take()
        copy = self._device.fetch_aside(self._rows[row : row + 1], [place])
        self._device.follow(copy)  # a step may write to the row
        return SavedBlock(view, _Arrived(copy))


class OwnCacheRows:
    """Caches of transformers' classes in the place of rows: moves run in call order.

    Args:
        cache: whose slots hold them.
        state_bytes: of a cache without tokens.
    """

    def __init__(self, cache: OwnCaches, state_bytes: int) -> None:
        self.state_bytes = state_bytes
        self._cache = cache

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of each part of a saved row."""
        return (self.state_bytes,)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        for source, destination in copies:
            self._cache.copy_state(source, destination)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop what sequences held that have ended."""
        for row in rows:
            self._cache.drop_state(row)

    def save(self, rows: Sequence[int]) -> tuple[SavedBlock, ...]:
        """Save nothing: no tier keeps them."""
        assert not rows, "caches of transformers' classes are not kept"
        return ()

    def load(self, loads: Sequence[StateLoad], saved: Sequence[SavedBlock]) -> None:
        """Load nothing: no tier has kept any."""
        assert not loads, "caches of transformers' classes are not kept"


class _Arrived:
    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy.wait()


def _writable(content: bytes | bytearray | memoryview) -> bytearray | memoryview:
    """Return the same bytes in memory that torch accepts."""
    return bytearray(content) if isinstance(content, bytes) else content
