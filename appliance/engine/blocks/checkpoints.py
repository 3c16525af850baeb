"""State checkpoints: immutable copies of recurrent state at block boundaries, found by content.

A checkpoint is the state after a full block's last token and has that block's chained hash. Knows
neither sequences nor blocks. Imports no torch.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

# Share of the checkpoints, least recently used first, among which it looks for a dispensable one.
_SEARCHED = 4  # one in this many


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One checkpoint.

    Attributes:
        content: hash of the chain that it follows.
        before: the nearest earlier checkpoint on the same chain.
        behind: checkpoints whose `before` is this one.
        num_restores: sequences about to continue from it, which keep it alive.
    """

    content: bytes
    row: int
    before: Checkpoint | None
    behind: set[Checkpoint] = field(default_factory=set)
    num_restores: int = 0


class Checkpoints:
    """The rows of all checkpoints: free, being written, or found by content.

    Cached blocks are useful only up to a later checkpoint. So among the least recently used
    checkpoints it first evicts those with a later one on the same chain, which keeps the blocks
    between them useful.

    Attributes:
        on_evict: called with content and row before evicting a useful checkpoint.
        num_evictions: useful checkpoints evicted so far.
    """

    def __init__(self, rows: range) -> None:
        self.on_evict: Callable[[bytes, int], None] | None = None
        self.num_evictions = 0
        self._rows = rows
        self.free = list(reversed(rows))  # a stack, lowest on top
        self.found: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.found)

    def __contains__(self, content: bytes) -> bool:
        return content in self.found

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_free(self) -> int:
        return len(self.free)

    def get(self, content: bytes) -> Checkpoint | None:
        """Return the checkpoint at the end of a chain."""
        return self.found.get(content)

    def depth(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks of a chain up to its last checkpoint."""
        for depth in range(len(hashes), 0, -1):
            if hashes[depth - 1] in self.found:
                return depth
        return 0

    def take(self) -> int | None:
        """Take a row to write to, evicting a checkpoint if necessary; None if all are in use."""
        if not self.free:
            spared = self._choose()
            if spared is None:
                return None
            self.evict(spared.content)
        return self.free.pop()

    def give_back(self, row: int) -> None:
        """Return a row that was taken and not added."""
        self.free.append(row)

    def add(self, hashes: Sequence[bytes], row: int) -> bool:
        """Register a written row as the checkpoint of a chain.

        Returns:
            False if the chain has one; the row is then free again.
        """
        if hashes[-1] in self.found:
            self.give_back(row)
            self.touch(hashes[-1])
            return False
        depth = self.depth(hashes[:-1])
        before = self.found[hashes[depth - 1]] if depth else None
        added = self.found[hashes[-1]] = Checkpoint(hashes[-1], row, before)
        if before is not None:
            # A checkpoint after both keeps `before`: its chain is unknown here.
            before.behind.add(added)
        return True

    def touch(self, content: bytes) -> None:
        self.found.move_to_end(content)

    def evict(self, content: bytes) -> None:
        """Evict a checkpoint, which a tier below may keep."""
        found = self.found.get(content)
        if found is not None:
            self.num_evictions += 1
            if self.on_evict is not None:
                self.on_evict(content, found.row)
            self.drop(content)

    def drop(self, content: bytes) -> None:
        """Remove a checkpoint without further use."""
        gone = self.found.pop(content)
        assert not gone.num_restores, "a sequence is about to go on from it"
        if gone.before is not None:
            gone.before.behind.remove(gone)
            gone.before.behind |= gone.behind
        for behind in gone.behind:
            behind.before = gone.before
        self.free.append(gone.row)

    def _choose(self) -> Checkpoint | None:
        """Choose the checkpoint to evict; None if sequences are about to use all of them."""
        idle = (one for one in self.found.values() if not one.num_restores)
        oldest = list(islice(idle, max(1, len(self.found) // _SEARCHED)))
        return next((one for one in oldest if one.behind), oldest[0] if oldest else None)

    def check_invariants(self, restored: Collection[int], taken: Collection[int]) -> None:
        """Recompute the records and assert that they agree.

        Args:
            restored: rows of checkpoints that sequences are about to continue from, with
                repetitions.
            taken: rows being written.
        """
        found = [one.row for one in self.found.values()]
        rows = sorted([*self.free, *found, *taken])
        assert rows == list(self._rows), "a row is lost, or a checkpoint is shared while written"
        for content, one in self.found.items():
            assert one.content == content
            counted = list(restored).count(one.row)
            assert one.num_restores == counted, "a checkpoint is not released"
            assert all(behind.before is one for behind in one.behind)
            if one.before is not None:
                assert self.found[one.before.content] is one.before
                assert one in one.before.behind
