from __future__ import annotations

from dataclasses import replace

import pytest

from appliance.engine.memory.experts.streaming import (
    BUS_GB_PER_SECOND,
    LEAST_ROWS,
    PIECE_BYTES,
    LayerWork,
    Streaming,
)

# Qwen3-30B-A3B at 4 bits in groups of 32 beside eight threads.
WORK = LayerWork(128, 8, 3 * 768 * 2048, 128 * 3 * 768 * 2048 * 5 // 8, 2048, 2, 8)
MATRIX = 768 * 2048


def test_the_threshold_is_where_the_bus_becomes_faster_than_the_host() -> None:
    rows = WORK.streamed_from()
    assert rows is not None
    assert 200 < rows < 500
    assert WORK.stream_seconds(rows) < WORK.host_seconds(rows)
    assert WORK.stream_seconds(rows - 1) >= WORK.host_seconds(rows - 1)
    bus = WORK.host_bytes / (BUS_GB_PER_SECOND * 1e9)
    assert WORK.stream_seconds(rows) == pytest.approx(bus)


def test_more_threads_move_it_up_and_enough_of_them_beyond_any_step() -> None:
    thresholds = [replace(WORK, threads=threads).streamed_from() for threads in (1, 2, 8, 16)]
    found = [rows for rows in thresholds if rows is not None]
    assert found == sorted(found)
    assert found[0] >= LEAST_ROWS
    assert replace(WORK, threads=128).streamed_from() is None


def test_buffers_hold_the_largest_expert_and_are_taken_only_if_a_step_reaches_the_threshold() -> (
    None
):
    used = Streaming.of(WORK, 512, MATRIX)
    assert used.is_used
    assert used.piece_bytes == PIECE_BYTES
    assert used.device_bytes == 2 * PIECE_BYTES + 14 * MATRIX
    assert not Streaming.of(WORK, 128, MATRIX).device_bytes
    large = replace(WORK, num_experts=8, top_k=2, host_bytes=8 * (PIECE_BYTES + 1))
    assert Streaming.of(large, 512, MATRIX).piece_bytes == PIECE_BYTES + 1


def test_the_banner_names_threshold_and_reason() -> None:
    used = Streaming.of(WORK, 512, MATRIX)
    said = used.in_words()
    assert f"steps of {used.rows:,} rows or more stream them to the GPU" in said
    assert "two buffers of 32 MiB" in said
    assert "at 25 GB/s of bus instead of" in said
    assert "assumed, not measured" in said
    small = Streaming.of(WORK, 128, MATRIX).in_words()
    assert f"would pay from {used.rows:,} rows of a step" in small
    assert "--max-num-batched-tokens is 128" in small
    never = Streaming.of(replace(WORK, threads=128), 512, MATRIX).in_words()
    assert "no number of rows makes the bus faster than the host" in never
