from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.engine.late_device import LateDevice

from appliance.engine.nouns.limits import SchedulerLimits
from appliance.engine.run.cuda_graphs import (
    MOST_ROWS,
    MOST_VERIFYING,
    PROMPTS,
    GraphCache,
    StepSize,
    buckets,
    step_sizes,
)
from appliance.engine.run.device import CaptureError, Graph
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.staging import ALIGNMENT, Staging, StepShape

LARGEST = StepShape(num_tokens=40, num_seqs=9, num_samples=9, table_width=7)


@pytest.mark.parametrize(
    "shape", [LARGEST, StepShape(1, 1, 1, 1), StepShape(33, 2, 0, 3), StepShape(8, 8, 8, 5)]
)
@pytest.mark.parametrize("device", [HostDevice(), LateDevice()], ids=["at once", "aside"])
def test_what_is_written_on_the_host_is_read_on_the_device(
    device: HostDevice, shape: StepShape
) -> None:
    staging = Staging(device, LARGEST)
    expected = {}
    for name, array in staging.arrays(shape).items():
        array[:] = np.random.default_rng(len(name)).integers(0, 99, array.shape)
        expected[name] = array.copy()
    tensors = staging.send(shape)
    for name, values in expected.items():
        parts = (tensors, tensors.sampling, tensors.penalties)
        (found,) = [getattr(part, name) for part in parts if hasattr(part, name)]
        assert found.data_ptr() % ALIGNMENT == 0 or found.numel() == 0
        assert np.array_equal(found.flatten().numpy(), values), name
    assert tensors.block_tables.shape == (shape.num_seqs, shape.table_width)


def test_a_row_reads_what_the_host_knows_or_what_the_step_before_sampled() -> None:
    shape = StepShape(num_tokens=3, num_seqs=3, num_samples=3, table_width=1)
    for device in (HostDevice(), LateDevice()):
        staging = Staging(device, LARGEST)
        arrays = staging.arrays(shape)
        arrays["token_ids"][:] = (5, 6, 7)
        arrays["sources"][:] = [len(staging.latest), 1, len(staging.latest) + 2]
        staging.latest[:3] = torch.tensor([90, 91, 92])
        staging.send(shape)
        expected = [5, 91, 7] if device.is_asynchronous else [5, 6, 7]
        assert staging.token_ids(shape).tolist() == expected


def test_the_width_of_the_tables_moves_nothing_else() -> None:
    narrow, wide = StepShape(8, 8, 8, 1).places(), StepShape(8, 8, 8, 700).places()
    assert {name: begin for name, (begin, _) in narrow.items()} == {
        name: begin for name, (begin, _) in wide.items()
    }


def test_a_host_buffer_is_filled_again_only_when_the_device_has_read_it() -> None:
    waits: list[int] = []

    class Past:
        is_over = True

        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            waits.append(self.number)

    class Counting(HostDevice):
        is_asynchronous = True
        sent = 0

        def record(self) -> Past:
            self.sent += 1
            return Past(self.sent)

    staging = Staging(Counting(), LARGEST)
    for _ in range(4):
        staging.arrays(LARGEST)
        staging.send(LARGEST)
    assert waits == [1, 2]


@pytest.mark.parametrize("most", [1, 5, 16, 31, 32, 33, 64, 100, 256, 1024])
def test_buckets_rise_to_the_largest_batch_and_waste_little(most: int) -> None:
    sizes = buckets(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(low < high for low, high in pairwise(sizes))
    cache = GraphCache(HostDevice(), step_sizes(SchedulerLimits(most, 2048, 4096)), 0)
    for rows in range(1, most + 1):
        size = cache.size_of(StepSize(rows))
        assert size is not None
        assert rows <= size.num_rows <= min(most, max(2 * rows - 1, rows + 31))


@pytest.mark.parametrize("most", [1, 4, 9, 64, 256])
def test_steps_with_prompts_are_padded_to_what_has_a_graph(most: int) -> None:
    limits = SchedulerLimits(most, 700, 4096)
    sizes = step_sizes(limits)
    assert len(set(sizes)) == len(sizes)
    assert max(size.num_rows for size in sizes) <= 875
    cache = GraphCache(HostDevice(), sizes, 1)
    assert cache.size_of(StepSize(0, 20)) is None, "nothing is captured yet"
    for size in sizes:
        cache.capture(size, lambda: None)
    for singles in range(most):
        for rows in (2, 32, 33, 150):
            found = cache.size_of(StepSize(singles, rows))
            assert found is not None
            assert found.num_singles <= max(8, 4 * singles)
            assert singles <= found.num_singles < max(most, 1)
            assert rows <= found.prompt_rows <= max(32, 2 * rows)
            assert found.num_samples == found.num_singles + PROMPTS
    assert cache.size_of(StepSize(0, 600)) is None


@pytest.mark.parametrize("most", [1, 2, 9, 16, 64])
def test_steps_with_drafts_are_padded_to_what_has_a_graph(most: int) -> None:
    limits = SchedulerLimits(most, 700, 4096)
    cache = GraphCache(HostDevice(), step_sizes(limits), 1)
    for size in cache.sizes:
        assert size.num_rows <= max(limits.sample_rows, 875)
        cache.capture(size, lambda: None)
    for sequences in range(1, min(most, MOST_VERIFYING) + 1):
        for each in range(1, MOST_ROWS):
            step = StepSize(sequences, draft_rows=each, rows_each=1 + each)
            found = cache.size_of(step)
            assert found is not None
            assert found.holds(step)
            assert found.rows_each <= 2 * step.rows_each
            assert found.num_samples == found.num_rows <= limits.sample_rows
            assert not cache.size_of(StepSize(sequences)).draft_rows  # type: ignore[union-attr]
    assert cache.size_of(StepSize(1, draft_rows=8, rows_each=9)) is None
    assert not any(size.draft_rows for size in step_sizes(limits, is_recurrent=True))
    off = SchedulerLimits(most, 700, 4096, verifies=False)
    assert not any(size.draft_rows for size in step_sizes(off))


@pytest.mark.parametrize("most", [1, 2, 9, 64, 256])
def test_a_chunk_that_fills_a_step_has_a_graph_whatever_is_beside_it(most: int) -> None:
    """One of about 270 launches: steps have 512 rows unless a setting asks for more."""
    budget = 512
    cache = GraphCache(HostDevice(), step_sizes(SchedulerLimits(most, budget, 4096)), 1)
    for size in cache.sizes:
        cache.capture(size, lambda: None)
    for singles in range(most):
        found = cache.size_of(StepSize(singles, budget - singles))
        assert found is not None
        assert found.num_rows <= budget * 5 // 4


class Hungry(HostDevice):
    """A device whose graphs take 100 bytes each; the fourth does not fit. Steps leave a reserve."""

    def __init__(self, error: Exception | None = None) -> None:
        self.used = 1000
        self.reserve = 5000
        self.left = 3
        self.error = error or MemoryError("none left")

    def memory_in_use(self) -> int:
        return self.used + self.reserve

    def begin_peak(self) -> int:
        self.reserve = 0
        return self.used

    def capture(self, function: object) -> Graph:
        self.reserve = 0
        if not self.left:
            raise self.error
        self.left -= 1
        self.used += 100
        return super().capture(lambda: None)


SIZES = (StepSize(1), StepSize(2), StepSize(4), StepSize(8))


def run_all(cache: GraphCache, sizes: tuple[int, ...]) -> list[int]:
    """Run sizes; return those that ran eagerly."""
    eager: list[int] = []
    for size in sizes:
        cache.run(StepSize(size), lambda size=size: eager.append(size))  # type: ignore[misc]
    return eager


def test_graphs_stop_at_their_bound() -> None:
    cache = GraphCache(Hungry(), SIZES, 150)
    assert run_all(cache, (1, 2, 2, 4)) == [1, 2, 2, 4]
    for size in SIZES[:2]:
        assert cache.has_room
        cache.capture(size, lambda: None)
    assert cache.num_bytes == 200
    assert not cache.has_room
    assert cache.captured == SIZES[:2]
    assert run_all(cache, (1, 2, 4)) == [4]


@pytest.mark.parametrize("error", [MemoryError("none left"), CaptureError("not permitted")])
def test_when_a_graph_cannot_be_there_are_no_more_of_them(error: Exception) -> None:
    cache = GraphCache(Hungry(error), SIZES, 10**6)
    for size in SIZES:
        assert cache.has_room
        cache.capture(size, lambda: None)
    assert cache.captured == SIZES[:3]
    assert run_all(cache, (8,)) == [8]
    assert not cache.has_room


def test_graphs_that_are_off_have_no_room() -> None:
    assert not GraphCache(HostDevice(), SIZES, 0).has_room
