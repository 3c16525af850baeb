"""Which tiles, splits and slices win, by a made-up clock; and what linears then launch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.kernels.packed_weights import random_packed
from support.kernels.stub_cuda import Launch, stub_gpu

from appliance.kernels.fp8_matmul import launch as fp8_matmul
from appliance.kernels.fp8_matmul.timed_linear import TimedFp8Linear
from appliance.kernels.gpu.timed import (
    LIBRARY,
    ROUNDS,
    LaunchChoice,
    OutOfTimeError,
    Timeable,
    TimedChoices,
    Timer,
    as_json,
    from_json,
    missing,
    time_choices,
)
from appliance.kernels.int8_matmul.launch import PromptLinear
from appliance.kernels.int8_matmul.timed_prompts import TimedPrompts
from appliance.kernels.packed_matmul.launch import TiledLinear, prepare_linear
from appliance.kernels.packed_matmul.timed_linear import DENSE_ROWS, TimedLinear
from appliance.kernels.weights.fp8 import Fp8Weight

CPU = torch.device("cpu")
SHAPE = 256, 4096
ROWS = 512


@pytest.fixture
def linears() -> list[TimedLinear]:
    return [tiled(*SHAPE), tiled(*SHAPE), tiled(512, 4096)]


def tiled(out_features: int, in_features: int) -> TimedLinear:
    weight = random_packed(out_features, in_features, 128, symmetric=True)
    with stub_gpu(86):
        linear = prepare_linear(weight, None, torch.bfloat16)
    assert isinstance(linear, TiledLinear)
    return TimedLinear(linear)


def multiplied(works: Sequence[Timeable], rows: int) -> None:
    x = works[0].inputs(rows, torch.bfloat16, torch.device("cpu"))
    for work in works:
        work.run(*x)


class Clock:
    """Says what a launch takes, by its last launch on the stub, and counts the questions."""

    def __init__(self, last: Launch, takes: Callable[[Launch, int], float | None]) -> None:
        self._last, self._takes = last, takes
        self.asked: list[tuple[str, int]] = []  # form, rows

    def __call__(self, works: Sequence[Timeable], rows: int) -> float | None:
        multiplied(works, rows)
        self.asked.append((works[0].name, rows))
        return self._takes(self._last, rows)

    def now(self) -> float:
        """A second for each measurement."""
        return float(len(self.asked))


def timer(clock: Clock, *, seconds: float = 1e9) -> Timer:
    return Timer(clock, seconds, clock.now)


def test_the_fastest_tile_and_its_splits_are_used_from_then_on(linears: list[TimedLinear]) -> None:
    """A tile of four warps is best, and the fewest programs along the inputs."""
    with stub_gpu(86) as last:

        def takes(last: Launch, rows: int) -> float:
            return 1.0 + int(last.threads != 128) + 0.2 * int(last.grid[2])

        found = time_choices(linears, 32, timer(Clock(last, takes)), {})
        name = linears[0].name
        for rows, entry in ((9, 16), (16, 16), (17, 32), (32, 32)):
            choice = found[name].entries[entry]
            assert choice.tile is not None
            multiplied(linears[1:2], rows)
            assert (last.threads, last.grid[2]) == (128, choice.splits)
            assert (choice.tile.max_rows, choice.tile.num_warps) == (entry, 4)
        best = found[name].entries[16]
        linears[0].use(TimedChoices({16: LaunchChoice(best.tile)}))
        multiplied(linears[:1], 16)
        computed, allowed = linears[0].linear.splits_for(16)
    assert best.splits == allowed[allowed.index(computed) - 1] < computed


def test_what_gains_hardly_anything_leaves_the_computed_choice(linears: list[TimedLinear]) -> None:
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
        for rows, choice in found[linears[0].name].entries.items():
            assert choice.tile == linears[0].candidates(rows)[0].tile


def test_a_card_that_is_slow_at_first_changes_nothing(linears: list[TimedLinear]) -> None:
    """The computed choice is measured first, when clocks are low; the second round is fair."""
    with stub_gpu(86) as last:
        clock = Clock(last, lambda *_: 3.0 if len(clock.asked) == 1 else 1.0)
        found = time_choices(linears[:1], 8, timer(clock), {})
        assert found[linears[0].name].entries[8].tile == linears[0].candidates(8)[0].tile


@pytest.mark.parametrize(("dense_from", "widened"), [(256, 128), (512, 256), (9999, 512)])
def test_dense_slices_begin_where_they_are_faster(
    linears: list[TimedLinear], dense_from: int, widened: int
) -> None:
    with stub_gpu(86) as last:

        def takes(last: Launch, rows: int) -> float:
            # The product of a dense slice is torch's: what is launched makes it dense.
            is_dense = last.grid[1] * 128 == SHAPE[1] and last.grid[2] == 1
            return 1.0 + int(is_dense != (rows >= dense_from)) * int(rows >= DENSE_ROWS[0])

        found = time_choices(linears[:2], ROWS, timer(Clock(last, takes)), {})
    assert found[linears[0].name].own_rows == widened


def test_no_more_is_timed_than_there_is_time_and_the_rest_another_time(
    linears: list[TimedLinear],
) -> None:
    with stub_gpu(86) as last:
        clock = Clock(last, lambda last, rows: 1.0)
        known: dict[str, TimedChoices] = {}
        left = [len(missing(linears, ROWS, known))]
        while left[-1]:
            before = len(clock.asked)
            # Enough for any one entry: three tiles twice, the best again, three splits twice.
            known = time_choices(linears, ROWS, timer(clock, seconds=6 * ROUNDS + 2), known)
            left.append(len(missing(linears, ROWS, known)))
            assert len(clock.asked) - before <= 6 * ROUNDS + 2
            assert left[-1] < left[-2]
        rows = [rows for _, rows in clock.asked]
        begin = rows.index(DENSE_ROWS[0])  # dense slices are timed last
        assert rows[:begin] == sorted(rows[:begin])
        assert set(rows[begin:]) == {256, 512}
        asked = len(clock.asked)
        time_choices(linears, ROWS, timer(clock), known)
    assert len(clock.asked) == asked


@dataclass
class Work:
    """Work whose measurements take as long as a test says, with entries of four choices each."""

    name: str = "work"
    has_splits: bool = False
    used: list[TimedChoices] = field(default_factory=list)

    def entries(self, most_rows: int) -> tuple[int, ...]:
        return tuple(range(1, most_rows + 1))

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        return tuple(LaunchChoice(splits=count) for count in (1, 2, 3, 4))

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        return ()

    def use(self, timed: TimedChoices) -> None:
        self.used.append(timed)

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return ()

    def run(self, *inputs: Any) -> object:
        return None


@pytest.mark.parametrize("each", [0.01, 0.3, 0.625, 0.7, 1.2, 2.4])
def test_five_seconds_are_kept_and_what_was_begun_is_given_up(each: float) -> None:
    """By hand: 8 measurements of an entry; those that end within 5 seconds are made."""
    time, work = 0.0, Work()

    def measure(works: Sequence[Timeable], entry: int) -> float:
        nonlocal time
        time += each
        return 1.0

    found = time_choices([work], 1000, Timer(measure, 5.0, lambda: time), {})
    assert time <= 5.0
    assert time > 5.0 - 2 * each
    done = len(found["work"].entries) if found else 0
    assert done == int(time / each + 1e-6) // 8
    assert work.used[-1] == found.get("work", TimedChoices())


def test_a_first_compilation_may_take_longer_than_the_budget() -> None:
    """Triton keeps what it compiles, so the next start comes further."""
    time = 0.0

    def measure(works: Sequence[Timeable], entry: int) -> float:
        nonlocal time
        time += 7.0
        return 1.0

    timer = Timer(measure, 5.0, lambda: time)
    assert timer.seconds([Work()], 1) == 1.0
    with pytest.raises(OutOfTimeError):
        timer.seconds([Work()], 1)
    with pytest.raises(OutOfTimeError):
        Timer(measure, 0.0, lambda: time).seconds([Work()], 1)


def test_a_tile_that_cannot_run_is_left_out(linears: list[TimedLinear]) -> None:
    with stub_gpu(86) as last:
        clock = Clock(last, lambda last, rows: None if last.threads == 128 else 1.0)
        found = time_choices(linears, 16, timer(clock), {})
    tiles = [one.tile for each in found.values() for one in each.entries.values()]
    assert {tile.num_warps for tile in tiles if tile is not None} == {2}
    with stub_gpu(86) as last:
        found = time_choices(linears, 16, timer(Clock(last, lambda *_: None)), {})
    assert found == {}


def test_choices_are_the_same_when_they_are_read_again(linears: list[TimedLinear]) -> None:
    with stub_gpu(86) as last:
        found = time_choices(linears, ROWS, timer(Clock(last, lambda *_: 1.0)), {})
    found["attention"] = TimedChoices({1024: LaunchChoice(keys=256)})
    assert from_json(json.loads(json.dumps(as_json(found)))) == found
    assert LIBRARY not in found[linears[0].name].entries


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@pytest.mark.parametrize("group", [32, 128])
def test_a_few_proven_tiles_are_tried_for_each_entry(capability: int, group: int) -> None:
    with stub_gpu(capability):
        linear = prepare_linear(random_packed(256, 1024, group), None, torch.bfloat16)
        assert isinstance(linear, TiledLinear)
        work = TimedLinear(linear)
        for rows in work.entries(ROWS):
            tried = [one.tile for one in work.candidates(rows) if one.tile is not None]
            assert 1 <= len(tried) <= 4
            assert {tile.max_rows for tile in tried} == {rows}
            assert len({tile.folds for tile in tried}) == 1


@pytest.mark.parametrize(("seconds", "multiplies"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
def test_prompts_are_in_int8_where_that_was_timed_to_be_faster(
    seconds: tuple[float, float], multiplies: bool
) -> None:
    """By a clock for which 256 rows take so long in int8 and in 16 bits; others are as computed."""
    prompts = TimedPrompts(PromptLinear(tiled(*SHAPE).linear, 0))

    def measure(works: Sequence[Timeable], rows: int) -> float:
        chosen = prompts.linear.linear.prompts.entries[rows]
        return seconds[chosen.tile is None] if rows == 256 else 1.0

    with stub_gpu(86) as last:
        found = time_choices([prompts], 300, Timer(measure, 1e9), {})
        assert list(found[prompts.name].entries) == [64, 128, 256, 512]
        kept = from_json(json.loads(json.dumps(as_json(found))))
        assert kept == found
        for rows in (129, 256, 257):
            before = int(last.count)
            multiplied([prompts], rows)
            in_int8 = last.count - before == 2  # with the kernel that rounds
            assert in_int8 == (
                multiplies if rows <= 256 else prompts.linear.computes_gain(512, CPU)
            )
        assert len(missing([prompts], 300, found)) == 0
        assert [entry for entry, _ in missing([prompts], 64, {})] == [64]


@pytest.mark.parametrize(("library_from", "own_rows"), [(128, 64), (512, 128), (9999, 2048)])
def test_fp8_products_are_timed_against_the_library_where_it_multiplies_them(
    library_from: int, own_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub executes nothing, so the library's product is noted and its result made up."""
    by_library: list[int] = []

    def noted(codes: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        by_library.append(len(codes))
        return torch.zeros(len(codes), weight.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(fp8_matmul, "library_multiplies", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", noted)
    codes = torch.zeros(256, 4096, dtype=torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.ones(256))
    with stub_gpu(89) as last:
        linear = fp8_matmul.prepare_linear(
            weight, None, torch.bfloat16, fp8_matmul.ActivationKind.FP8
        )
        assert isinstance(linear, fp8_matmul.Fp8Linear)
        work = TimedFp8Linear(linear)
        assert work.entries(2048) == (16, 64), "more rows are the library's, until it is timed"

        def takes(last: Launch, rows: int) -> float:
            if rows <= 64:  # four warps have both tiles; the wider one has fewer programs
                return 1.0 + 0.2 * int(last.grid[2])
            is_library = bool(by_library) and by_library.pop() == rows
            by_library.clear()
            return 1.0 + int(is_library != (rows >= library_from))

        found = time_choices([work], 2048, timer(Clock(last, takes)), {})
        assert found[work.name].own_rows == own_rows
        assert set(found[work.name].entries) == {16, 64}
        for rows in (64, 128, 512, 2048):
            linear(torch.zeros(rows, 4096, dtype=torch.bfloat16))
        assert by_library == [rows for rows in (64, 128, 512, 2048) if rows > own_rows]
        best = found[work.name].entries[64]
        linear(torch.zeros(64, 4096, dtype=torch.bfloat16))
        assert last.grid[2] == best.splits
        work.use(TimedChoices())
        linear(torch.zeros(64, 4096, dtype=torch.bfloat16))
        computed, allowed = linear.splits_for(fp8_matmul.choose_fp8_tile(64, 89))
        assert last.grid[2] == computed
    assert best.splits is not None
    assert best.splits < computed
    assert best.splits in allowed
