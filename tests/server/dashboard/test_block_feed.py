from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.server.block_cells import pack_cell, unpack_cell

from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.nouns.messages import EngineInfo, Table
from appliance.events import MAX_SHOWN_AGE, NO_OWNER, BlockState, Delta, Snapshot
from appliance.server.dashboard.block_feed import (
    MAX_RUNS,
    BlockFeed,
    ages_of,
    cells_of,
    changed_runs,
    table_entries,
)

NUM_BLOCKS = 6000
INFO = EngineInfo(
    model="m", architecture="a", device="cpu", backend="b", weight_format="w", kv_format="bf16",
    context_length=64, vocab_size=9, eos_token_ids=(), block_size=16, num_blocks=NUM_BLOCKS,
    max_num_seqs=4, weight_bytes=0, kv_bytes=0, workspace_bytes=0, memory_bytes=0,
    load_seconds=0.0, fingerprint="f",
)  # fmt: skip


def test_cells_hold_what_the_engine_wrote() -> None:
    metadata = BlockMetadata(num_blocks=4)
    metadata.begin_step(2**32 - 1)
    metadata.write(1, BlockState.ACTIVE, owner=65_000, references=300)
    metadata.write(2, BlockState.CACHED)
    cells = cells_of(np.asarray(metadata.words)).tolist()
    assert [unpack_cell(cell) for cell in cells] == [
        (BlockState.FREE, 0, 0, NO_OWNER),
        (BlockState.ACTIVE, 0, 255, 65_000),
        (BlockState.CACHED, 0, 0, NO_OWNER),
        (BlockState.FREE, 0, 0, NO_OWNER),
    ]
    assert cells[1] == pack_cell(BlockState.ACTIVE, 0, 300, 65_000)


def test_ages_are_seconds_since_a_block_changed_hands() -> None:
    metadata = BlockMetadata(num_blocks=4)
    for block, when in enumerate((100.0, 160.05, 161.2)):
        metadata.begin_step(when)
        metadata.write(block, BlockState.ACTIVE, owner=1)
    words = np.asarray(metadata.words)
    assert ages_of(words, 161.15).tolist() == [61, 1, 0, MAX_SHOWN_AGE]
    assert ages_of(words, 161.2 + 100_000).tolist()[2] == MAX_SHOWN_AGE
    wrap = 2**32 / 10
    metadata.begin_step(wrap - 3)
    metadata.write(0, BlockState.CACHED)
    assert ages_of(words, wrap + 4).tolist()[0] == 7


def test_an_entry_of_a_block_table_says_what_the_engine_wrote() -> None:
    metadata = BlockMetadata(num_blocks=8)
    metadata.write(6, BlockState.ACTIVE, owner=1, references=3, precision=2)
    metadata.write(1, BlockState.WRITING, owner=1, references=1)
    table = Table(request_id="r", index=0, num_tokens=20, blocks=(6, 1), hashes=b"\xab" * 16)
    first, last = table_entries(table, metadata.words)
    assert (first.block, first.hash, first.references, first.precision) == (6, "ab" * 16, 3, 2)
    assert (last.block, last.hash, last.references) == (1, "", 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60))
def test_runs_turn_one_map_into_the_other(pairs: list[tuple[int, int]]) -> None:
    before, after = (np.array(column, dtype=np.uint64) for column in zip(*pairs, strict=True))
    before, after = before << np.uint64(44), after << np.uint64(44)  # states
    runs = changed_runs(before, after)
    patched = cells_of(before)
    touched = 0
    for run in runs:
        patched[run.start : run.start + run.length] = run.cell
        touched += run.length
    assert (patched == cells_of(after)).all()
    assert touched == (before != after).sum()
    ends = [(run.start, run.start + run.length) for run in runs]
    assert ends == sorted(ends)


def test_a_watcher_gets_a_snapshot_then_changes_then_a_snapshot_of_another_engine() -> None:
    buffer = memoryview(bytearray(NUM_BLOCKS * 8))
    metadata = BlockMetadata(buffer, num_blocks=NUM_BLOCKS)
    feed = BlockFeed()
    words = buffer.cast("Q")
    first = feed.poll(words, INFO)
    assert isinstance(first, Snapshot)
    assert (first.num_blocks, first.block_size) == (NUM_BLOCKS, 16)
    assert feed.poll(words, INFO) is None

    for block in (7, 8, 9):
        metadata.write(block, BlockState.ACTIVE, owner=3, references=1)
    delta = feed.poll(words, INFO)
    assert isinstance(delta, Delta)
    assert delta.epoch == first.epoch
    assert [(run.start, run.length) for run in delta.runs] == [(7, 3)]

    metadata.begin_step(77.0)
    metadata.write(8, BlockState.ACTIVE, owner=3, references=1)
    taken_again = feed.poll(words, INFO)
    assert isinstance(taken_again, Delta)
    assert [(run.start, run.length) for run in taken_again.runs] == [(8, 1)], "its age is 0 again"

    for owner in range(1, 50):  # a watcher that reads slowly gets only the last of these
        metadata.write(11, BlockState.WRITING, owner=owner, references=1)
    late = feed.poll(words, INFO)
    assert isinstance(late, Delta)
    assert [unpack_cell(run.cell)[3] for run in late.runs] == [49]
    assert feed.poll(words, INFO) is None

    for block in range(0, 2 * MAX_RUNS + 2, 2):
        metadata.write(block, BlockState.CACHED)
    many = feed.poll(words, INFO)
    assert isinstance(many, Snapshot)
    assert many.epoch == first.epoch + 1
    assert many.words() == cells_of(np.asarray(metadata.words)).tobytes()

    other = memoryview(bytearray(NUM_BLOCKS * 8)).cast("Q")
    again = feed.poll(other, INFO)
    assert isinstance(again, Snapshot)
    assert not np.frombuffer(again.words(), dtype="<u4").astype(np.uint16).any()
