"""Open blocks hold the tokens of partial blocks until these are full and sealed.

A small pool with its own ids. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def num_open_blocks(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, *, plans: int = 1
) -> int:
    """Return a number of open blocks that never runs out.

    A running sequence holds one for each of its partial blocks. If n of its tokens are in plans,
    these are at most (n + block_size - 2) // block_size + 1 blocks, and the tokens of all sequences
    are at most the budget of each plan. A sequence that begins with a copy of a block needs one
    more: the source keeps its own until the plan is complete.
    """
    return plans * max_num_batched_tokens // block_size + 3 * max_num_seqs


class OpenBlocks:
    """Maps partial blocks to their open blocks.

    Args:
        num_open: size of the pool; 0 without sealed blocks.
    """

    def __init__(self, num_open: int) -> None:
        self._num_open = num_open
        self._free = list(reversed(range(num_open)))
        self._open_of: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self._num_open > 0

    def __contains__(self, block: int) -> bool:
        return block in self._open_of

    def __getitem__(self, block: int) -> int:
        return self._open_of[block]

    @property
    def is_exhausted(self) -> bool:
        """True if a pool exists and all of it is in use."""
        return not self._free and self._num_open > 0

    def get(self, block: int) -> int:
        return self._open_of.get(block, -1)

    def claim(self, block: int) -> None:
        """Give a block an open block, if there is a pool."""
        if self._num_open:
            assert block not in self._open_of, f"block {block} has an open block"
            assert self._free, "more blocks are written than `num_open_blocks` counted"
            self._open_of[block] = self._free.pop()

    def release(self, block: int) -> None:
        """Take back a block's open block, if it has one."""
        held = self._open_of.pop(block, None)
        if held is not None:
            self._free.append(held)

    def check_invariants(self, writable: Collection[int]) -> None:
        """Assert that exactly the partial blocks have an open block, and that none is lost."""
        if self._num_open:
            assert set(self._open_of) == set(writable), "open blocks of blocks that are not partial"
        known = [*self._free, *self._open_of.values()]
        assert sorted(known) == list(range(self._num_open)), "an open block is lost or shared"
