"""Publishes each block's state as a 64-bit word in memory that other processes can map.

Writes a word when a block changes hands, never per token. Only `unpack` needs numpy, which an
engine that computes nothing and the process that answers /metrics do without.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.events import BlockState

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np
    from numpy.typing import NDArray


# | owner 16 | state 4 | references 8 | precision 4 | stamp 32 |, most significant first
PRECISION_SHIFT = 32
REFERENCES_SHIFT = 36
STATE_SHIFT = 44
OWNER_SHIFT = 48
MAX_REFERENCES = 2**8 - 1
STAMP_MASK = 2**32 - 1
MAX_OWNER = 2**16 - 2  # the dashboard's feed uses 2**16 - 1 for "no owner"
BYTES_PER_BLOCK = 8
STAMPS_PER_SECOND = 10
# Names of states in /metrics; an active block in several tables counts as shared.
STATE_NAMES = {
    BlockState.FREE: "free",
    BlockState.CACHED: "cached",
    BlockState.ACTIVE: "active",
    BlockState.WRITING: "writing",
    BlockState.LOADING: "loading",
}


SHARED = "shared"


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


def stamp_of(now: float) -> int:
    """Convert a monotonic time to tenths of a second modulo 2**32."""
    return int(now * STAMPS_PER_SECOND) & STAMP_MASK


def count_states(words: memoryview) -> dict[str, int]:
    """Count blocks by state in (num_blocks,) 64-bit words; each counts once."""
    counts = dict.fromkeys((*STATE_NAMES.values(), SHARED), 0)
    # State, references and precision are the third 16 bits of a little-endian word. Counting equal
    # ones runs in C: 65,536 blocks take milliseconds.
    for middle, count in Counter(words.cast("B").cast("H")[2::4]).items():
        state = middle >> (STATE_SHIFT - PRECISION_SHIFT)
        references = middle >> (REFERENCES_SHIFT - PRECISION_SHIFT) & MAX_REFERENCES
        shared = state == BlockState.ACTIVE and references > 1
        counts[SHARED if shared else STATE_NAMES[BlockState(state)]] += count
    return counts


@dataclass(frozen=True, slots=True)
class BlockFields:
    owner: NDArray[np.uint16]  # (num_blocks,) slot of its last owner, 0 after that has ended
    state: NDArray[np.uint8]  # (num_blocks,) a BlockState
    references: NDArray[np.uint8]  # (num_blocks,) block tables that hold it; saturates at 255
    precision: NDArray[np.uint8]  # (num_blocks,) index into `EngineInfo.precisions`
    stamp: NDArray[np.uint32]  # (num_blocks,) time of its last change of hands, see `stamp_of`


def unpack(published: memoryview | NDArray[np.uint64]) -> BlockFields:
    """Split words (num_blocks,) into fields of the same shape."""
    import numpy as np

    words: NDArray[np.uint64] = np.asarray(published, dtype=np.uint64)
    return BlockFields(
        owner=(words >> np.uint64(OWNER_SHIFT)).astype(np.uint16),
        state=(words >> np.uint64(STATE_SHIFT) & np.uint64(0xF)).astype(np.uint8),
        references=(words >> np.uint64(REFERENCES_SHIFT) & np.uint64(MAX_REFERENCES)).astype(
            np.uint8
        ),
        precision=(words >> np.uint64(PRECISION_SHIFT) & np.uint64(0xF)).astype(np.uint8),
        stamp=(words & np.uint64(STAMP_MASK)).astype(np.uint32),
    )
