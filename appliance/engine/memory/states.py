"""Plans the rows of recurrent state: sequences' slots and checkpoints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.memory.plan import MemoryRequest

# By default a running sequence has room for checkpoints at the ends of its prompt and answer and of
# two older turns; all checkpoints together take a share of the memory for keys and values.
CHECKPOINTS_PER_SLOT = 4
_SHARE_OF_CACHE = 4  # one in this many


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Rows of recurrent state; all 0 without recurrent layers."""

    row_bytes: int = 0
    num_slots: int = 0
    num_checkpoints: int = 0

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * (self.num_slots + self.num_checkpoints)


NO_STATES = StateMemory()


def needed_states(request: MemoryRequest) -> StateMemory:
    """Return the configured rows; no checkpoints by default."""
    row_bytes = request.state_bytes
    if not row_bytes:
        return NO_STATES
    asked = (request.state_checkpoint_memory or 0) if request.prefix_caching else 0
    return StateMemory(row_bytes, request.max_num_seqs, asked // row_bytes)


def planned_states(request: MemoryRequest, left: int) -> StateMemory:
    """Return the rows to allocate.

    Args:
        left: bytes left after the needed rows and the smallest KV cache.
    """
    needed = needed_states(request)
    is_planned = request.state_checkpoint_memory is None and request.prefix_caching
    if not (needed.row_bytes and is_planned):
        return needed
    most = left // _SHARE_OF_CACHE // needed.row_bytes
    count = min(CHECKPOINTS_PER_SLOT * needed.num_slots, max(most, 0))
    return StateMemory(needed.row_bytes, needed.num_slots, count)
