from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from appliance.engine.blocks.block_metadata import (
    BYTES_PER_BLOCK,
    MAX_OWNER,
    STAMPS_PER_SECOND,
    BlockMetadata,
    count_states,
    unpack,
)
from appliance.events import BlockState


@given(
    owner=st.integers(0, MAX_OWNER),
    state=st.sampled_from(BlockState),
    references=st.integers(0, 1000),
    precision=st.integers(0, 15),
    now=st.floats(0, 2**34),
)
def test_what_is_written_is_what_a_reader_unpacks(
    owner: int, state: BlockState, references: int, precision: int, now: float
) -> None:
    metadata = BlockMetadata(num_blocks=3)
    metadata.begin_step(now)
    metadata.write(1, state, owner, references, precision)
    fields = unpack(metadata.words)
    assert fields.owner.tolist() == [0, owner, 0]
    assert fields.state.tolist() == [BlockState.FREE, state, BlockState.FREE]
    assert fields.references.tolist() == [0, min(references, 255), 0]
    assert fields.precision.tolist() == [0, precision, 0]
    assert fields.stamp.tolist() == [0, int(now * STAMPS_PER_SECOND) % 2**32, 0]
    assert metadata.owner(1) == owner


def test_the_words_live_in_the_memory_that_was_handed_in() -> None:
    memory = bytearray(b"\xff" * (4 * BYTES_PER_BLOCK + 5))
    metadata = BlockMetadata(memoryview(memory), num_blocks=4)
    reader = np.frombuffer(memory, dtype=np.uint64, count=4)
    assert reader.tolist() == [0, 0, 0, 0]  # what another process left there is removed
    assert memory[-5:] == b"\xff" * 5
    metadata.write(2, BlockState.ACTIVE, owner=7, references=2)
    fields = unpack(reader)
    assert fields.state.tolist() == [0, 0, BlockState.ACTIVE, 0]
    assert fields.owner.tolist() == [0, 0, 7, 0]


def test_every_block_is_counted_once_by_its_state() -> None:
    metadata = BlockMetadata(num_blocks=10)
    metadata.begin_step(2.0**31)  # a stamp whose bits are all over
    metadata.write(1, BlockState.CACHED, precision=1)
    metadata.write(2, BlockState.ACTIVE, owner=MAX_OWNER, references=1, precision=15)
    metadata.write(3, BlockState.ACTIVE, owner=1, references=2)
    metadata.write(4, BlockState.ACTIVE, owner=1, references=300, precision=3)
    metadata.write(5, BlockState.WRITING, owner=2, references=1)
    metadata.write(6, BlockState.LOADING, owner=2, references=1)
    metadata.write(7, BlockState.LOADING, owner=2, references=1)
    assert count_states(metadata.words) == {
        "free": 3, "cached": 1, "active": 1, "shared": 2, "writing": 1, "loading": 2,
    }  # fmt: skip
