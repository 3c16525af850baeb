"""Publishes each block's state as a 64-bit word in memory that other processes can map.

Writes a word when a block changes hands, never per token. `block_fields` reads them. Imports no
numpy, which an engine that computes nothing can do without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.blocks.block_word import (
    MAX_REFERENCES,
    OWNER_SHIFT,
    PRECISION_SHIFT,
    REFERENCES_SHIFT,
    STAMP_MASK,
    STATE_SHIFT,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from appliance.events import BlockState

BYTES_PER_BLOCK = 8
STAMPS_PER_SECOND = 10


def stamp_of(now: float) -> int:
    """Convert a monotonic time to tenths of a second modulo 2**32."""
    return int(now * STAMPS_PER_SECOND) & STAMP_MASK


class BlockMetadata:
    """Writes the words.

    Args:
        buffer: at least 8 * num_blocks writable bytes, which it clears; None allocates private
            ones.

    Attributes:
        words: the same memory, read-only, (num_blocks,) of 64 bits.
    """

    def __init__(self, buffer: memoryview | None = None, *, num_blocks: int) -> None:
        size = num_blocks * BYTES_PER_BLOCK
        if buffer is None:
            buffer = memoryview(bytearray(size))
        assert buffer.nbytes >= size, f"{buffer.nbytes} bytes cannot hold {num_blocks} words"
        whole = buffer.cast("B")[:size]
        whole[:] = bytes(size)
        # Item assignment through a memoryview is one aligned store, at half of numpy's cost.
        self._cells = whole.cast("Q")
        self._stamp = 0
        self.words = self._cells.toreadonly()

    def begin_step(self, now: float) -> None:
        """Stamp later writes with a monotonic time, in seconds."""
        self._stamp = stamp_of(now)

    def write(
        self,
        block: int,
        state: BlockState,
        owner: int = 0,
        references: int = 0,
        precision: int = 0,
    ) -> None:
        """Replace the word of one block.

        Args:
            owner: slot of a sequence, at most `MAX_OWNER`.
            references: number of block tables that hold it, clamped to `MAX_REFERENCES`.
            precision: index into `EngineInfo.precisions`, 0 to 15.
        """
        self._cells[block] = (
            owner << OWNER_SHIFT
            | state << STATE_SHIFT
            | min(references, MAX_REFERENCES) << REFERENCES_SHIFT
            | precision << PRECISION_SHIFT
            | self._stamp
        )

    def owner(self, block: int) -> int:
        return self._cells[block] >> OWNER_SHIFT

    def check_invariants(
        self,
        states: Mapping[int, BlockState],
        references: Mapping[int, int],
        precisions: Mapping[int, int],
        owners: Mapping[int, Collection[int]],
    ) -> None:
        """Assert that the words match each block's state; `owners` lists the valid owners."""
        for block, word in enumerate(self.words):
            assert word >> STATE_SHIFT & 0xF == states[block], block
            count = min(references.get(block, 0), MAX_REFERENCES)
            assert word >> REFERENCES_SHIFT & MAX_REFERENCES == count, block
            assert word >> PRECISION_SHIFT & 0xF == precisions[block], block
            assert word >> OWNER_SHIFT in owners[block], block
