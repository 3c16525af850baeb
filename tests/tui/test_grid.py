from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.tui.grid import NO_BLOCK, Grid

sides = st.integers(1, 60)


@given(st.integers(1, 20_000), sides, sides)
def test_every_block_lies_under_one_pixel_or_one_tile(blocks: int, width: int, height: int) -> None:
    grid = Grid(blocks, width, height)
    buckets = [grid.blocks_at(x, y) for y in range(height) for x in range(width)]
    if grid.dense:
        # In reading order the buckets divide all blocks into consecutive pieces: none is missing or
        # double.
        assert buckets[0].start == 0
        assert buckets[-1].stop == blocks
        assert all(one.stop == other.start for one, other in pairwise(buckets))
        sizes = {len(bucket) for bucket in buckets}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
    else:
        assert max(len(bucket) for bucket in buckets) == 1
        assert {bucket.start for bucket in buckets if bucket} == set(range(blocks))


@given(st.integers(1, 3000), sides, sides)
def test_tiles_are_rectangles_that_differ_by_a_pixel(blocks: int, width: int, height: int) -> None:
    grid = Grid(blocks, width, height)
    if grid.dense:
        return
    picture = grid.shown(np.zeros(blocks, dtype=np.uint32))
    widths, heights = set(), set()
    for block in range(blocks):
        rows, columns = np.nonzero(picture == block)
        tile = (int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1)
        assert rows.size == tile[0] * tile[1]
        widths.add(tile[0])
        heights.add(tile[1])
    assert max(widths) - min(widths) <= 1
    assert max(heights) - min(heights) <= 1


@pytest.mark.parametrize(("width", "height"), [(112, 62), (78, 34), (196, 100)])
@pytest.mark.parametrize("blocks", [1, 2, 60, 100, 300, 500, 1000, 1777, 2048])
def test_little_of_the_area_stays_empty(blocks: int, width: int, height: int) -> None:
    picture = Grid(blocks, width, height).shown(np.zeros(blocks, dtype=np.uint32))
    assert np.count_nonzero(picture == NO_BLOCK) <= 0.05 * picture.size


@given(st.integers(1, 50), st.integers(1, 50), st.data())
def test_a_pixel_shows_the_first_block_of_the_highest_rank(
    width: int, height: int, data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(width * height, 4 * width * height))
    seed = data.draw(st.integers(0, 2**12 - 1))
    ranks = np.random.default_rng(seed).integers(0, 4, blocks).astype(np.uint32)
    grid = Grid(blocks, width, height)
    shown = grid.shown(ranks)
    for y in range(height):
        for x in range(width):
            assert shown[y, x] == max(grid.blocks_at(x, y), key=lambda one: (ranks[one], -one))


def test_nothing_to_show() -> None:
    assert (Grid(0, 3, 2).shown(np.zeros(0, dtype=np.uint32)) == NO_BLOCK).all()
    assert Grid(5, 0, 2).shown(np.zeros(5, dtype=np.uint32)).shape == (2, 0)
    assert Grid(0, 3, 2).blocks_at(1, 1) == range(0)
