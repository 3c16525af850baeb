"""From words to colours: which colour each pixel of the block map has in each mode.

Pure functions on arrays; the widget only turns the result into terminal cells.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from appliance.events import NO_OWNER, BlockState
from appliance.tui import palette
from appliance.tui.grid import NO_BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.tui.blocks import Blocks
    from appliance.tui.grid import Grid


class ColorMode(Enum):
    """What the colour of a block says."""

    OWNER = "owner"
    STATE = "state"
    REFERENCES = "references"

    @property
    def next(self) -> ColorMode:
        """The mode that the key switches to."""
        modes = list(ColorMode)
        return modes[(modes.index(self) + 1) % len(modes)]


# Indices into PAINT.
NONE, FREE, CACHED, ACTIVE, SHARED = range(5)
OWNER = 5
REFERENCE = OWNER + len(palette.OWNER_HUES)
_BRIGHT = (
    palette.BACKGROUND,
    palette.FREE,
    palette.CACHED,
    palette.ACTIVE,
    palette.SHARED,
    *palette.OWNER_HUES,
    *palette.REFERENCE_STEPS,
)
DIMMED = len(_BRIGHT)  # added to an index, the dimmed form of that colour
PAINT = (*_BRIGHT, *(palette.dimmed(color) for color in _BRIGHT))

_MAX_STATE = 15
_STEP_OF_REFERENCES = np.array([0, 0, 1, 2, 2, 3, 3, 3, 3] + [4] * 247, dtype=np.uint8)


def appearance(blocks: Blocks) -> NDArray[np.uint8]:
    """(num_blocks,) FREE, CACHED, ACTIVE or SHARED; a state this version cannot name is active."""
    of_state = np.full(_MAX_STATE + 1, ACTIVE, dtype=np.uint8)
    of_state[BlockState.FREE] = FREE
    of_state[BlockState.CACHED] = CACHED
    looks = of_state[blocks.states]
    looks[(looks == ACTIVE) & (blocks.references > 1)] = SHARED
    return looks


def pixels(
    blocks: Blocks, grid: Grid, mode: ColorMode, *, focus: int | None = None, stale: bool = False
) -> NDArray[np.uint8]:
    """The picture of the block map.

    Args:
        blocks: what to draw.
        grid: where each block lies.
        mode: what colours mean.
        focus: owner slot to bring out, everything else dimmed; None brings out all.
        stale: the map is not current; all of it is dimmed.

    Returns:
        (grid.height, grid.width) indices into `PAINT`.
    """
    if not blocks.num_blocks:
        return np.full((grid.height, grid.width), NONE, dtype=np.uint8)
    looks = appearance(blocks)
    references = blocks.references
    focused = (looks >= ACTIVE) & (blocks.owners == focus) if focus is not None else None
    # In a bucket the focused sequence wins, then shared > active > cached > free.
    ranks = looks.astype(np.uint64) << np.uint64(8) | references
    if focused is not None:
        ranks |= focused.astype(np.uint64) << np.uint64(16)

    shown = grid.shown(ranks)
    index = _colors(blocks, looks, mode)[shown]
    if stale:
        index = index + np.uint8(DIMMED)
    elif focused is not None:
        index = np.where(focused[shown], index, index + np.uint8(DIMMED))
    return np.where(shown == NO_BLOCK, np.uint8(NONE), index)


def _colors(blocks: Blocks, looks: NDArray[np.uint8], mode: ColorMode) -> NDArray[np.uint8]:
    """(num_blocks,) index into `PAINT` of each block by itself."""
    if mode is ColorMode.STATE:
        return looks
    if mode is ColorMode.OWNER:
        owners = blocks.owners
        hues = (OWNER + owners % len(palette.OWNER_HUES)).astype(np.uint8)
        return np.where((looks == ACTIVE) & (owners != NO_OWNER), hues, looks)
    steps = REFERENCE + _STEP_OF_REFERENCES[blocks.references]
    return np.where(looks >= ACTIVE, steps, looks).astype(np.uint8)
