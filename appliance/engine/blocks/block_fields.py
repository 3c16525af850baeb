"""Reads the words that `block_metadata` publishes: who owns each block, its state and its age."""

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
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BlockFields:
    owner: NDArray[np.uint16]  # (num_blocks,) slot of its last owner, 0 after that has ended
    state: NDArray[np.uint8]  # (num_blocks,) a BlockState
    references: NDArray[np.uint8]  # (num_blocks,) block tables that hold it; saturates at 255
    precision: NDArray[np.uint8]  # (num_blocks,) index into `EngineInfo.precisions`
    stamp: NDArray[np.uint32]  # (num_blocks,) time of its last change of hands, see `stamp_of`


def unpack(published: memoryview | NDArray[np.uint64]) -> BlockFields:
    """Split words (num_blocks,) into fields of the same shape."""
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
