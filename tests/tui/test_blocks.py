from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from appliance.events import BlockRun, Delta, Snapshot
from appliance.tui.blocks import BlockCounts, Blocks
from tests.tui.conftest import CACHED, FREE, active, snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence


def delta(*runs: Sequence[int]) -> Delta:
    return Delta(epoch=1, runs=tuple(BlockRun(*run) for run in runs))


def test_words_are_taken_apart() -> None:
    blocks = Blocks.of(snapshot([FREE, CACHED, active(7, 300), active(3)]))
    assert blocks.num_blocks == 4
    assert blocks.states.tolist() == [0, 1, 2, 2]
    assert blocks.references.tolist() == [0, 0, 255, 1]
    assert blocks.owners.tolist() == [0xFFFF, 0xFFFF, 7, 3]
    assert blocks.counts() == BlockCounts(free=1, cached=1, active=2, shared=1)


def test_a_delta_makes_a_new_map() -> None:
    before = Blocks.of(snapshot([FREE] * 6))
    after = before.after(delta((0, 1, active(1)), (3, 2, CACHED)))
    assert after.cells.tolist() == [active(1), FREE, FREE, CACHED, CACHED, FREE]
    assert before.cells.tolist() == [FREE] * 6
    with pytest.raises(ValueError, match="read-only"):
        after.cells[0] = 0


@pytest.mark.parametrize(
    "run", [(-1, 2, FREE), (5, 2, FREE), (2, -1, FREE), (0, 1, -1), (0, 1, 2**32)]
)
def test_a_delta_outside_the_map_is_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="into a map of 6 blocks"):
        Blocks.of(snapshot([FREE] * 6)).after(delta(run))


@pytest.mark.parametrize(
    "broken",
    [
        Snapshot(epoch=1, num_blocks=4, block_size=16, cells="not base64!"),
        Snapshot(epoch=1, num_blocks=4, block_size=16, cells="bm90IHpsaWI="),
        Snapshot(epoch=1, num_blocks=3, block_size=16, cells=snapshot([FREE] * 4).cells),
        Snapshot(epoch=1, num_blocks=-3, block_size=16, cells=snapshot([FREE] * 4).cells),
    ],
)
def test_a_broken_snapshot_is_refused(broken: Snapshot) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (each has its own words)
        Blocks.of(broken)
