from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tui.viewport import Viewport, levels

blocks = st.integers(1, 200_000)
sides = st.integers(1, 200)


@given(blocks, sides, sides, st.integers(0, 12), st.data(), st.booleans())
def test_the_window_lies_in_the_cache_and_holds_the_cursor(
    num_blocks: int, columns: int, rows: int, level: int, data: st.DataObject, lettered: bool
) -> None:
    cursor = data.draw(st.integers(0, num_blocks - 1))
    port = Viewport.at(num_blocks, columns, rows, level=level, cursor=cursor, lettered=lettered)
    assert 0 <= port.span.start <= cursor < port.span.stop <= num_blocks
    assert port.zoomed is (len(port.span) < num_blocks)
    assert port.grid.num_blocks == len(port.span)


@given(blocks, sides, sides)
def test_levels_go_from_all_blocks_to_one_a_cell(num_blocks: int, columns: int, rows: int) -> None:
    counts = levels(num_blocks, columns, rows)
    assert counts[0] == num_blocks
    assert counts[-1] == min(num_blocks, columns * rows)
    assert counts == sorted(counts, reverse=True)
    assert all(four <= 4 * one + 4 for four, one in pairwise(counts))
    assert 2 * columns * rows in counts or num_blocks <= 2 * columns * rows, "one a pixel"


@given(blocks, sides, sides, st.integers(0, 12), st.booleans())
def test_every_cell_of_a_full_window_is_over_blocks_of_it(
    num_blocks: int, columns: int, rows: int, level: int, lettered: bool
) -> None:
    port = Viewport.at(num_blocks, columns, rows, level=level, cursor=None, lettered=lettered)
    for x, y in ((0, 0), (columns - 1, 0), (0, rows - 1), (columns // 2, rows // 2)):
        under = port.blocks_at(x, y)
        assert not under or (under.start in port.span and under.stop - 1 in port.span)
    assert port.blocks_at(0, 0).start == port.span.start


def test_the_last_level_is_lettered_and_without_half_blocks_every_level_is() -> None:
    assert not Viewport.at(65_536, 120, 40, level=0, cursor=None).lettered
    assert Viewport.at(65_536, 120, 40, level=99, cursor=None).lettered
    assert Viewport.at(65_536, 120, 40, level=0, cursor=None, lettered=True).lettered


def test_most_steps_of_the_cursor_leave_the_window_where_it_is() -> None:
    spans = {
        Viewport.at(65_536, 120, 40, level=2, cursor=cursor).span
        for cursor in range(30_000, 31_000)
    }
    assert len(spans) <= 2


@pytest.mark.parametrize(("columns", "rows"), [(0, 0), (5, 0), (0, 5)])
def test_no_area_and_no_blocks(columns: int, rows: int) -> None:
    assert not Viewport.at(100, columns, rows, level=3, cursor=7).blocks_at(0, 0)
    assert not Viewport.at(0, 10, 10, level=3, cursor=None).blocks_at(0, 0)
