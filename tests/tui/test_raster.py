from __future__ import annotations

import numpy as np
from support.server.block_cells import pack_cell

from appliance.events import NO_OWNER
from appliance.tui import raster
from appliance.tui.blocks import Blocks
from appliance.tui.grid import Grid
from appliance.tui.raster import ColorMode, Emphasis, pixels
from tests.tui.conftest import CACHED, FREE, active, snapshot

CELLS = [FREE, CACHED, active(1), active(2), active(9), active(1, 2), active(1, 4), active(1, 255)]


def row(mode: ColorMode, focus: int | None = None, *, stale: bool = False) -> list[int]:
    """One pixel for each of CELLS."""
    blocks = Blocks.of(snapshot(CELLS))
    picture = pixels(blocks, Grid(len(CELLS), len(CELLS), 1), mode, Emphasis(focus, stale=stale))
    assert picture.dtype == np.uint8
    return [int(index) for index in picture[0]]


def test_owners_are_hues_and_shared_blocks_stand_out() -> None:
    first = raster.OWNER
    shared = [raster.SHARED] * 3
    assert row(ColorMode.OWNER) == [
        raster.FREE, raster.CACHED, first + 1, first + 2, first + 2, *shared
    ]  # fmt: skip


def test_states() -> None:
    assert row(ColorMode.STATE) == [
        raster.FREE, raster.CACHED, *[raster.ACTIVE] * 3, *[raster.SHARED] * 3
    ]  # fmt: skip


def test_reference_counts_are_steps() -> None:
    first = raster.REFERENCE
    assert row(ColorMode.REFERENCES) == [
        raster.FREE, raster.CACHED, first, first, first, first + 1, first + 2, first + 4
    ]  # fmt: skip


def test_adapters_are_hues_also_of_shared_blocks() -> None:
    blocks = Blocks.of(snapshot(CELLS))
    grid, adapters = Grid(len(CELLS), len(CELLS), 1), {1: 2, 9: 8}
    picture = pixels(blocks, grid, ColorMode.ADAPTER, adapters=adapters)
    first, own = raster.OWNER, raster.OWNER + 2
    assert picture[0].tolist() == [
        raster.FREE, raster.CACHED, own, raster.ACTIVE, first + 1, *[own] * 3
    ]  # fmt: skip
    drawn = raster.letters(picture, blocks, grid, ColorMode.ADAPTER)[0]
    assert "".join(map(chr, drawn)) == ".:c#bccc"


def test_focus_dims_all_others() -> None:
    plain, focused = row(ColorMode.OWNER), row(ColorMode.OWNER, focus=1)
    bright = [2, 5, 6, 7]
    assert focused == [
        index if at in bright else index + raster.DIMMED for at, index in enumerate(plain)
    ]


def test_a_focused_sequence_without_blocks_dims_all() -> None:
    assert row(ColorMode.OWNER, focus=NO_OWNER) == [
        index + raster.DIMMED for index in row(ColorMode.OWNER)
    ]


def test_a_stale_map_is_dim_all_over() -> None:
    assert row(ColorMode.STATE, focus=1, stale=True) == [
        index + raster.DIMMED for index in row(ColorMode.STATE)
    ]


def test_a_bucket_shows_its_most_used_block() -> None:
    blocks = Blocks.of(snapshot([FREE, CACHED, active(1), active(1), active(2, 2), active(3)]))
    picture = pixels(blocks, Grid(6, 3, 1), ColorMode.OWNER)
    assert picture.tolist() == [[raster.CACHED, raster.OWNER + 1, raster.SHARED]]
    picture = pixels(blocks, Grid(6, 3, 1), ColorMode.OWNER, Emphasis(3))
    assert picture[0, 2] == raster.OWNER + 3, "the focused sequence is seen in any bucket"


def test_what_this_version_does_not_know_is_still_drawn() -> None:
    blocks = Blocks.of(snapshot([pack_cell(9, 0, 1, 4), pack_cell(2, 0, 1, NO_OWNER)]))
    picture = pixels(blocks, Grid(2, 2, 1), ColorMode.OWNER)
    assert picture.tolist() == [[raster.OWNER + 4, raster.ACTIVE]]


def test_no_blocks_no_colours() -> None:
    picture = pixels(Blocks.of(snapshot([])), Grid(0, 3, 2), ColorMode.OWNER)
    assert picture.tolist() == [[raster.NONE] * 3] * 2


def test_there_is_a_colour_for_every_index() -> None:
    assert len(raster.PAINT) == 2 * raster.DIMMED <= 256
    assert len(raster.LETTERS) == len(raster.PAINT)


def test_modes_go_round() -> None:
    mode, seen = ColorMode.OWNER, []
    for _ in ColorMode:
        seen.append(mode)
        mode = mode.next
    assert mode is ColorMode.OWNER
    assert set(seen) == set(ColorMode)
