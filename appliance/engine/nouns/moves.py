"""Moves of blocks and recurrent states: within the cache, to host memory and back, and their speed.

Imports no torch and knows neither tensors nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


MIN_ROWS = 16  # minimum of a step that measures prefill
_WEIGHT = 0.2  # of a new measurement


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block in every layer, with its open block in sealed layers."""

    source: int
    destination: int
    open_source: int = -1
    open_destination: int = -1


@dataclass(frozen=True, slots=True)
class BlockSave:
    """Copy one block's content, in every layer, out of the cache.

    Attributes:
        open_block: the block's, if it is partial and layers are sealed.
    """

    block: int
    open_block: int = -1


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Write content into one block, in every layer.

    Attributes:
        source: the content, or its index among the same plan's saves.
        open_block: the block's, if it is partial and layers are sealed.
    """

    block: int
    source: SavedBlock | int
    open_block: int = -1

    def content(self, saved: Sequence[SavedBlock]) -> SavedBlock:
        """Return the content to write, given the same plan's saves."""
        return saved[self.source] if isinstance(self.source, int) else self.source


class Awaitable(Protocol):
    """Pending work on a device."""

    def wait(self) -> object:
        """Block until it has ended; may be called repeatedly."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SavedBlock:
    """A block's content in host memory.

    Attributes:
        over: ends when the bytes have arrived, if the device copies asynchronously.
    """

    content: bytes | bytearray | memoryview
    over: Awaitable | None = None

    def read(self) -> bytes | bytearray | memoryview:
        if self.over is not None:
            self.over.wait()
        return self.content


class StateCopy(NamedTuple):
    """Copy one row of recurrent state, in all layers."""

    source: int
    destination: int


class StateLoad(NamedTuple):
    """Write content into one row of recurrent state.

    Attributes:
        source: the content, or its index among the same plan's saves.
    """

    row: int
    source: SavedBlock | int

    def content(self, saved: Sequence[SavedBlock]) -> SavedBlock:
        """Return the content to write, given the same plan's saves."""
        return saved[self.source] if isinstance(self.source, int) else self.source


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Moves of recurrent states around one step, in this order; see `StateSlots`.

    Attributes:
        saves: rows to copy out of the cache, together with the plan's blocks.
        copies: states that sequences continue from, in order.
        checkpoints: copies after all rows of the step.
        ended: rows of sequences that ended, which no copy fills, to forget after the copies.
    """

    saves: tuple[int, ...] = ()
    loads: tuple[StateLoad, ...] = ()
    copies: tuple[StateCopy, ...] = ()
    checkpoints: tuple[StateCopy, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(slots=True)
class Rates:
    """Moving averages of the speed of prefill and of moves; 0 before the first measurement."""

    prefill: float = 0.0  # tokens per second
    moves: float = 0.0  # bytes per second, one way

    def saw_step(self, num_rows: int, seconds: float) -> None:
        if num_rows >= MIN_ROWS and seconds > 0:
            self.prefill = moving_average(self.prefill, num_rows / seconds)

    def saw_moves(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self.moves = moving_average(self.moves, num_bytes / seconds)


def moving_average(before: float, now: float) -> float:
    """Update an exponential moving average; 0 means none so far."""
    return now if before == 0 else before + _WEIGHT * (now - before)
