"""Which tiles, splits and slices win, by a made-up clock; and what linears then launch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.kernels.packed_weights import random_packed
from support.kernels.stub_cuda import Launch, stub_gpu

from appliance.kernels.packed_matmul.launch import TiledLinear, prepare_linear
from appliance.kernels.packed_matmul.timed import (
    DENSE_ROWS,
    TimedChoices,
    Timer,
    candidates,
    entries,
    missing,
    name_of,
    time_choices,
)

SHAPE = 256, 4096
ROWS = 512


@pytest.fixture
def linears() -> list[TiledLinear]:
    return [tiled(*SHAPE), tiled(*SHAPE), tiled(512, 4096)]


def tiled(out_features: int, in_features: int) -> TiledLinear:
    weight = random_packed(out_features, in_features, 128, symmetric=True)
    with stub_gpu(86):
        linear = prepare_linear(weight, None, torch.bfloat16)
    assert isinstance(linear, TiledLinear)
    return linear


def multiplied(linears: Sequence[Any], rows: int) -> None:
    for linear in linears:
        linear(torch.zeros(rows, linear.in_features, dtype=torch.bfloat16))


class Clock:
    """Says what a launch takes, by its last launch on the stub, and counts the questions."""

    def __init__(self, last: Launch, takes: Callable[[Launch, int], float | None]) -> None:
        self._last, self._takes = last, takes
        self.asked: list[tuple[int, int]] = []  # out_features, rows

    def __call__(self, linears: Sequence[Any], rows: int) -> float | None:
        multiplied(linears, rows)
        self.asked.append((linears[0].out_features, rows))
        return self._takes(self._last, rows)


def timer(clock: Clock, *, most: int = 1 << 30) -> Timer:
    return Timer(86, clock, lambda: len(clock.asked) >= most)


def test_the_fastest_tile_and_its_splits_are_used_from_then_on(linears: list[TiledLinear]) -> None:
    """A tile of four warps is best, and the fewest programs along the inputs."""
    with stub_gpu(86) as last:

        def takes(last: Launch, rows: int) -> float:
            return 1.0 + int(last.threads != 128) + 0.2 * int(last.grid[2])

        found = time_choices(linears, 32, timer(Clock(last, takes)), {})
        name = name_of(linears[0].form)
        for rows, entry in ((9, 16), (16, 16), (17, 32), (32, 32)):
            tile, splits = found[name].tiles[entry]
            multiplied(linears[1:2], rows)
            assert (last.threads, last.grid[2]) == (128, splits)
            assert (tile.max_rows, tile.num_warps) == (entry, 4)
        linears[0].use(TimedChoices({16: (found[name].tiles[16][0], None)}))
        multiplied(linears[:1], 16)
        computed, allowed = linears[0].splits_for(16)
    assert found[name].tiles[16][1] == allowed[allowed.index(computed) - 1] < computed


def test_what_gains_hardly_anything_leaves_the_computed_choice(linears: list[TiledLinear]) -> None:
    with stub_gpu(86) as last:
        before = []
        for rows in (8, 16, 32):
            multiplied(linears, rows)
            before.append((last.threads, tuple(last.grid)))
        noise = iter([1.0, 0.98] * 1000)
        found = time_choices(linears, 32, timer(Clock(last, lambda *_: next(noise))), {})
        for rows, expected in zip((8, 16, 32), before, strict=True):
            multiplied(linears, rows)
            assert (last.threads, tuple(last.grid)) == expected
    form = linears[0].form
    for rows, (tile, _) in found[name_of(form)].tiles.items():
        assert tile == candidates(form, rows, 86)[0]


@pytest.mark.parametrize(("dense_from", "widened"), [(256, 128), (512, 256), (9999, 512)])
def test_dense_slices_begin_where_they_are_faster(
    linears: list[TiledLinear], dense_from: int, widened: int
) -> None:
    with stub_gpu(86) as last:

        def takes(last: Launch, rows: int) -> float:
            # The product of a dense slice is torch's: what is launched makes it dense.
            is_dense = last.grid[1] * 128 == SHAPE[1] and last.grid[2] == 1
            return 1.0 + int(is_dense != (rows >= dense_from)) * int(rows >= DENSE_ROWS[0])

        found = time_choices(linears[:2], ROWS, timer(Clock(last, takes)), {})
    assert found[name_of(linears[0].form)].widened_rows == widened


def test_no_more_is_timed_than_there_is_time_and_the_rest_another_time(
    linears: list[TiledLinear],
) -> None:
    with stub_gpu(86) as last:
        clock = Clock(last, lambda last, rows: 1.0)
        known: dict[str, TimedChoices] = {}
        left = [len(missing(linears, ROWS, 86, known))]
        while left[-1]:
            before = len(clock.asked)
            known = time_choices(linears, ROWS, timer(clock, most=before + 1), known)
            left.append(len(missing(linears, ROWS, 86, known)))
            assert len(clock.asked) - before <= 6  # one entry: three tiles, three splits
            assert left[-1] == left[-2] - 1
        rows = [rows for _, rows in clock.asked]
        begin = rows.index(DENSE_ROWS[0])  # dense slices are timed last
        assert rows[:begin] == sorted(rows[:begin])
        assert set(rows[begin:]) == {256, 512}
        asked = len(clock.asked)
        time_choices(linears, ROWS, timer(clock), known)
    assert len(clock.asked) == asked


def test_a_tile_that_cannot_run_is_left_out(linears: list[TiledLinear]) -> None:
    with stub_gpu(86) as last:
        clock = Clock(last, lambda last, rows: None if last.threads == 128 else 1.0)
        found = time_choices(linears, 16, timer(clock), {})
    assert {tile.num_warps for each in found.values() for tile, _ in each.tiles.values()} == {2}


def test_choices_are_the_same_when_they_are_read_again(linears: list[TiledLinear]) -> None:
    with stub_gpu(86) as last:
        found = time_choices(linears, ROWS, timer(Clock(last, lambda *_: 1.0)), {})
    kept = json.loads(json.dumps({name: each.to_json() for name, each in found.items()}))
    assert {name: TimedChoices.from_json(each) for name, each in kept.items()} == found


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@pytest.mark.parametrize("group", [32, 128])
def test_a_few_proven_tiles_are_tried_for_each_entry(capability: int, group: int) -> None:
    with stub_gpu(capability):
        linear = prepare_linear(random_packed(256, 1024, group), None, torch.bfloat16)
    assert isinstance(linear, TiledLinear)
    for rows in entries(linear.form, capability, ROWS):
        tried = candidates(linear.form, rows, capability)
        assert 1 <= len(tried) <= 4
        assert {tile.max_rows for tile in tried} == {rows}
        assert len({tile.folds for tile in tried}) == 1
