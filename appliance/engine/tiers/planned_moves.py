"""Collects a plan's moves between cache and host memory. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from appliance.engine.nouns.moves import BlockLoad, BlockSave, SavedBlock, StateLoad
from appliance.engine.tiers.host_store import HostBlock

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        for block, host, open_block, is_state in arrivals:
            source = host.saved or places[host]
            if is_state:
                state_loads.append(StateLoad(block, source))
            else:
                loads.append(BlockLoad(block, source, open_block))
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
