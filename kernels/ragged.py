"""The geometry of one step: which rows belong to which sequence, and where their keys live.

Built once per step by the engine, read by every layer. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Sequences of unequal length side by side, decode rows and prefill chunks mixed.

    Sequence i owns rows query_start[i] .. query_start[i+1] of every per-token tensor. Its rows
    are the last ones of its context: row j of it stands at position
    context_lens[i] - query_lens[i] + j and attends to positions 0 .. its own. The first
    `num_decodes` sequences have exactly one row each.
    """

    query_start: Tensor  # (num_seqs + 1,) int32
    context_lens: Tensor  # (num_seqs,) int32, tokens with this step's included
    block_tables: Tensor  # (num_seqs, max_blocks) int32, padded with 0
    slot_mapping: Tensor  # (num_tokens,) int64, slot where each row's key and value go
    num_decodes: int
    # The same on the host, so that launchers and CPU loops never wait for a device.
    host_query_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...]
    host_block_tables: tuple[tuple[int, ...], ...]

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return len(self.host_query_lens)
