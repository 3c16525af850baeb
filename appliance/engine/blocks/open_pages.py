"""Open pages: they hold the tokens of partial blocks until these are full and sealed.

Open pages are a small pool beside the blocks. Imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


def num_open_pages(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, *, plans: int = 1
) -> int:
    """Return a number of open pages that never runs out.

    A running sequence holds one page for each of its partial blocks. If n of its tokens are in
    plans, these are at most (n + block_size - 2) // block_size + 1 blocks, and the tokens of all
    sequences are at most the budget of each plan. One more for each sequence that begins with a
    copy of a block: the source keeps its page until the plan is complete.
    """
    return plans * max_num_batched_tokens // block_size + 3 * max_num_seqs


class OpenPages:
    """Maps blocks to pages of a pool.

    Args:
        num_pages: size of the pool; 0 where blocks are never sealed, and then no block has a page.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._free = list(reversed(range(num_pages)))
        self._pages: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self._num_pages > 0

    def __contains__(self, block: int) -> bool:
        return block in self._pages

    def __getitem__(self, block: int) -> int:
        return self._pages[block]

    @property
    def is_exhausted(self) -> bool:
        """True if there is a pool and all its pages are in use."""
        return not self._free and self._num_pages > 0

    def get(self, block: int) -> int:
        """Return a block's page, or -1."""
        return self._pages.get(block, -1)

    def claim(self, block: int) -> None:
        """Give a block a page, if there is a pool."""
        if self._num_pages:
            assert block not in self._pages, f"block {block} has an open page"
            assert self._free, "more blocks are written than `num_open_pages` counted"
            self._pages[block] = self._free.pop()

    def release(self, block: int) -> None:
        """Take back a block's page, if it has one."""
        page = self._pages.pop(block, None)
        if page is not None:
            self._free.append(page)

    def check_invariants(self, writable: Collection[int]) -> None:
        """Assert that exactly the partial blocks have a page, and that none is lost."""
        if self._num_pages:
            assert set(self._pages) == set(writable), "open pages of other blocks"
        pages = [*self._free, *self._pages.values()]
        assert sorted(pages) == list(range(self._num_pages)), "an open page is lost or shared"
