"""Publishes each block's state as a 64-bit word in memory that other processes can map.

Writes a word when a block changes hands, never per token. A reader needs only numpy and this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

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

    from numpy.typing import NDArray

    from appliance.events import BlockState

BYTES_PER_BLOCK = 8
STAMPS_PER_SECOND = 10


@dataclass(frozen=True, slots=True)
class BlockFields:
    owner: NDArray[np.uint16]  # (num_blocks,) slot of its last owner, 0 after that has ended
    state: NDArray[np.uint8]  # (num_blocks,) a BlockState
    references: NDArray[np.uint8]  # (num_blocks,) block tables that hold it; saturates at 255
    precision: NDArray[np.uint8]  # (num_blocks,) index into `EngineInfo.precisions`
    stamp: NDArray[np.uint32]  # (num_blocks,) time of its last change of hands, see `stamp_of`


def unpack(words: NDArray[np.uint64]) -> BlockFields:
    """Split words (num_blocks,) into fields of the same shape."""
    return BlockFields(
        owner=(words >> np.uint64(OWNER_SHIFT)).astype(np.uint16),
        state=(words >> np.uint64(STATE_SHIFT) & np.uint64(0xF)).astype(np.uint8),
        references=(words >> np.uint64(REFERENCES_SHIFT) & np.uint64(0xFF)).astype(np.uint8),
        precision=(words >> np.uint64(PRECISION_SHIFT) & np.uint64(0xF)).astype(np.uint8),
        stamp=(words & np.uint64(STAMP_MASK)).astype(np.uint32),
    )


def stamp_of(now: float) -> int:
    """Convert a monotonic time to tenths of a second modulo 2**32."""
    return int(now * STAMPS_PER_SECOND) & STAMP_MASK


class BlockMetadata:
    """Writes the words.

    Args:
        buffer: at least 8 * num_blocks writable bytes, which it clears; None allocates private
            ones.

    Attributes:
        words: the same memory as a read-only array, (num_blocks,) uint64.
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
        self.words: NDArray[np.uint64] = np.frombuffer(whole.toreadonly(), dtype=np.uint64)

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
        fields = unpack(self.words)
        words = zip(
            *(fields.state.tolist(), fields.references.tolist()),
            *(fields.precision.tolist(), fields.owner.tolist()),
            strict=True,
        )
        for block, (state, count, precision, owner) in enumerate(words):
            assert state == states[block], block
            assert count == min(references.get(block, 0), MAX_REFERENCES), block
            assert precision == precisions[block], block
            assert owner in owners[block], block
