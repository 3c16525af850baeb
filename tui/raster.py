"""Colours the pixels of the block map.

Pure functions on arrays; the widget turns their result into terminal cells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from appliance.events import NO_OWNER, BlockState
from appliance.tui import palette
from appliance.tui.grid import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from appliance.tui.blocks import Blocks
    from appliance.tui.grid import Grid


class ColorMode(Enum):
    """Meaning of a block's colour."""

    OWNER = "owner"
    STATE = "state"
    REFERENCES = "references"
    PRECISION = "precision"
    AGE = "age"
    ADAPTER = "adapter"

    @property
    def next(self) -> ColorMode:
        modes = list(ColorMode)
        return modes[(modes.index(self) + 1) % len(modes)]


# Indices into PAINT, from the least to the most important in a bucket.
NONE, FREE, CACHED, LOADING, ACTIVE, WRITING, SHARED = range(7)
OWNER = 7
REFERENCE = OWNER + len(palette.OWNER_HUES)
AGE = REFERENCE + len(palette.REFERENCE_STEPS)
CURSOR = AGE + len(palette.AGE_STEPS)
_BRIGHT = (
    palette.BACKGROUND,
    palette.FREE,
    palette.CACHED,
    palette.SWAPPED,
    palette.ACTIVE,
    palette.WRITING,
    palette.SHARED,
    *palette.OWNER_HUES,
    *palette.REFERENCE_STEPS,
    *palette.AGE_STEPS,
    palette.CURSOR,
)
DIMMED = len(_BRIGHT)  # offset from a colour's index to its dimmed form
PAINT = (*_BRIGHT, *(palette.dimmed(color) for color in _BRIGHT))
# One letter per index, for one block per cell and for terminals without colours.
_STEPS = "".join(map(str, range(1, 1 + len(palette.REFERENCE_STEPS))))
LETTERS = " .:s#w*" + "#" * len(palette.OWNER_HUES) + _STEPS + _STEPS[::-1] + "X"
LETTERS += " .:" + "-" * (DIMMED - 3)
_LETTER_OF = np.array([ord(letter) for letter in LETTERS], dtype=np.uint32)
_DIGITS = np.array([ord(digit) for digit in "0123456789ABCDEF"], dtype=np.uint32)

AGE_LIMITS = (1.0, 10.0, 60.0, 600.0)  # seconds; where the next of `palette.AGE_STEPS` begins
_STEP_OF_REFERENCES = np.array([0, 0, 1, 2, 2, 3, 3, 3, 3] + [4] * 247, dtype=np.uint8)
_HOLDS_TOKENS = CACHED  # this index and those after it hold tokens
_NO_ADAPTERS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Emphasis:
    """The part of a map to highlight.

    Attributes:
        slot: slot of the focused sequence; all others are dimmed. None highlights all.
        table: its physical blocks, shared ones included; empty if unknown.
        stale: dims the whole map, which is not current.
    """

    slot: int | None = None
    table: frozenset[int] = frozenset()
    stale: bool = False

    def moved(self, by: int) -> Emphasis:
        """Shift the block ids, for a part of the map."""
        return self if not by else replace(self, table=frozenset(at + by for at in self.table))


def _looks_table() -> NDArray[np.uint8]:
    """Return FREE to SHARED by the lower half of a cell, (2**16,); unknown states are ACTIVE."""
    cells = np.arange(2**16, dtype=np.uint32)
    of_state = np.full(16, ACTIVE, dtype=np.uint8)
    of_state[BlockState.FREE] = FREE
    of_state[BlockState.CACHED] = CACHED
    of_state[BlockState.LOADING] = LOADING
    of_state[BlockState.WRITING] = WRITING
    looks: NDArray[np.uint8] = of_state[cells & 0xF]
    looks[(looks == ACTIVE) & (cells >> 8 > 1)] = SHARED
    return looks


_LOOKS = _looks_table()
_RANKS = _LOOKS.astype(np.uint32) << 8 | np.arange(2**16, dtype=np.uint32) >> 8
_FOCUSED_RANK = np.uint32(1 << 11)


def appearance(cells: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return FREE to SHARED for each cell."""
    looks: NDArray[np.uint8] = _LOOKS[cells & np.uint32(0xFFFF)]
    return looks


def pixels(
    blocks: Blocks,
    grid: Grid,
    mode: ColorMode,
    emphasis: Emphasis = Emphasis(),
    now: float = 0.0,
    adapters: Mapping[int, int] = _NO_ADAPTERS,
) -> NDArray[np.uint8]:
    """Draw the block map.

    Args:
        now: seconds of the clock of `blocks.changed`.
        adapters: number of the adapter, by owner slot.

    Returns:
        (grid.height, grid.width) indices into `PAINT`.
    """
    if not blocks.num_blocks:
        return np.full((grid.height, grid.width), NONE, dtype=np.uint8)
    # The focused sequence wins in its bucket, then the block most in use.
    ranks = _RANKS[blocks.cells & np.uint32(0xFFFF)]
    focused = _focused(blocks, emphasis)
    if focused is not None:
        ranks = ranks | focused * _FOCUSED_RANK
    shown = grid.shown(ranks)
    index = _colors(blocks.cells[shown], blocks.changed[shown], mode, now, adapters)
    if emphasis.stale:
        index = index + np.uint8(DIMMED)
    elif focused is not None:
        index = np.where(focused[shown], index, index + np.uint8(DIMMED))
    return np.where(shown == NO_BLOCK, np.uint8(NONE), index)


def letters(
    picture: NDArray[np.uint8], blocks: Blocks, grid: Grid, mode: ColorMode
) -> NDArray[np.uint32]:
    """Return a letter for each pixel; a-z for owners and adapters.

    `picture` is (grid.height, grid.width) indices into `PAINT`, as `pixels` returns.

    Returns:
        (grid.height, grid.width) code points.
    """
    drawn = _LETTER_OF[picture]
    if (
        mode not in (ColorMode.OWNER, ColorMode.PRECISION, ColorMode.ADAPTER)
        or not blocks.num_blocks
    ):
        return drawn
    cells = blocks.cells[grid.shown(_RANKS[blocks.cells & np.uint32(0xFFFF)])]
    named = (picture >= OWNER) & (picture < REFERENCE)
    if mode is ColorMode.OWNER:
        names = ord(letter_of(0)) + (cells >> np.uint32(16)) % 26
    elif mode is ColorMode.ADAPTER:
        names = ord(letter_of(0)) + picture.astype(np.uint32) - OWNER
    else:
        names = _DIGITS[cells >> np.uint32(4) & np.uint32(0xF)]
    return np.where(named, names, drawn).astype(np.uint32)


def letter_of(slot: int) -> str:
    """Return the letter of a slot, for terminals without colours."""
    return chr(ord("a") + slot % 26)


def _focused(blocks: Blocks, emphasis: Emphasis) -> NDArray[np.bool_] | None:
    """Return the blocks of the focused sequence as (num_blocks,) bool; None without one."""
    if emphasis.slot is None:
        return None
    owned: NDArray[np.bool_] = (blocks.owners == emphasis.slot) & (
        appearance(blocks.cells) >= LOADING
    )
    if emphasis.table:
        at = np.fromiter(emphasis.table, dtype=np.int64)
        owned[at[(at >= 0) & (at < blocks.num_blocks)]] = True
    return owned


def _colors(
    cells: NDArray[np.uint32],
    changed: NDArray[np.float32],
    mode: ColorMode,
    now: float,
    adapters: Mapping[int, int],
) -> NDArray[np.uint8]:
    looks = appearance(cells)
    match mode:
        case ColorMode.STATE:
            return looks
        case ColorMode.OWNER:
            owners = cells >> np.uint32(16)
            hues = (OWNER + owners % len(palette.OWNER_HUES)).astype(np.uint8)
            owned = ((looks == ACTIVE) | (looks == WRITING)) & (owners != NO_OWNER)
            return np.where(owned, hues, looks)
        case ColorMode.REFERENCES:
            steps = REFERENCE + _STEP_OF_REFERENCES[cells >> np.uint32(8) & np.uint32(0xFF)]
            return np.where(looks >= ACTIVE, steps, looks).astype(np.uint8)
        case ColorMode.PRECISION:
            index = (cells >> np.uint32(4) & np.uint32(0xF)) % len(palette.OWNER_HUES)
            return np.where(looks >= _HOLDS_TOKENS, OWNER + index, looks).astype(np.uint8)
        case ColorMode.ADAPTER:
            of_owner = np.full(2**16, ACTIVE, dtype=np.uint8)
            for slot, number in adapters.items():
                of_owner[slot] = OWNER + number % len(palette.OWNER_HUES)
            return np.where(looks >= ACTIVE, of_owner[cells >> np.uint32(16)], looks)
        case ColorMode.AGE:
            steps = AGE + np.searchsorted(AGE_LIMITS, now - changed, side="right")
            return np.where(looks >= _HOLDS_TOKENS, steps, looks).astype(np.uint8)
