"""The low-rank factors of one place in every slot of a table. Imports no triton.

A place is what runs as one linear. It has a part for each linear that adapters may change: rows of
`shrink` of its own. A piece is a run of outputs that one part adds to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK_N = 64  # outputs of a program
LEAST_RANK = 16  # of a tensor core's tile
MOST_RANK = 64  # numbers of a part that a program takes


class OutputRun(NamedTuple):
    """Outputs of a place that one part adds to, and where their rows of `expand` begin."""

    first_output: int
    first_row: int
    num_rows: int
    part: int


@dataclass(frozen=True, slots=True)
class StackedFactors:
    """Factors of one place, slot by slot: expand(scale * shrink(x)) is added to its outputs.

    Slots lie further apart than their factors here, so first strides are those of the table.

    Attributes:
        shrink: (num_slots, num_parts, rank, in_features).
        expand: (num_slots, rows of all pieces, rank), zero beyond a part's own rank.
        scales: (num_slots, num_parts) float32.
        ranks: (num_slots, num_parts) int32; 0: the slot's adapter leaves the part alone.
        pieces: of the outputs.
        blocks: (num_blocks, 4) int32 on the device, as `blocks_of` cuts the pieces.
    """

    shrink: Tensor
    expand: Tensor
    scales: Tensor
    ranks: Tensor
    pieces: tuple[OutputRun, ...]
    blocks: Tensor


def blocks_of(pieces: Sequence[OutputRun]) -> list[OutputRun]:
    """Cut pieces into blocks of at most BLOCK_N outputs."""
    return [
        OutputRun(output + start, row + start, min(BLOCK_N, count - start), part)
        for output, row, count, part in pieces
        for start in range(0, count, BLOCK_N)
    ]


def padded_rank(rank: int) -> int:
    """Return the rank that a table has room for: a power of two, beyond 64 a multiple of it."""
    if rank > MOST_RANK:
        return -(-rank // MOST_RANK) * MOST_RANK
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())
