"""Tracks the tokens whose keys and values a draft model's cache holds. Imports no torch.

A sequence's full blocks lie there under the target's block ids, so sequences that share blocks
share them here too. Later tokens lie in scratch blocks of the sequence's slot, which nobody shares:
the target's last block may be copied on write or not allocated yet. A wrong record costs
acceptance, never an answer.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from appliance.engine.scheduling.policy import MAX_ANSWER_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.sequence import Sequence


def scratch_blocks(block_size: int) -> int:
    """Return a slot's scratch blocks, for the tokens after the full blocks and drafts."""
    return -(-(block_size - 1 + MAX_ANSWER_ROWS) // block_size)


class HiddenStates(Protocol):
    """The served model's hidden states or streams, which a head reads."""

    def first(self, sequence: Sequence) -> int:
        """Return the first position from which on all hidden states are kept."""
        ...

    def end(self, sequence: Sequence) -> None: ...


@dataclass(slots=True)
class _Tail:
    """Tokens in a slot's scratch blocks."""

    owner: Sequence
    first: int  # position of the first token, a multiple of the block size
    token_ids: list[int]


@dataclass(slots=True)
class _Read:
    """A sequence's full blocks, as far as it has looked at them."""

    contents: list[int] = field(default_factory=list)  # chained hash of each block's tokens
    known: array[int] = field(default_factory=lambda: array("i"))  # leading blocks that hold them
    holes: set[int] = field(default_factory=set)  # of these, indices that a head must skip


class DraftBlocks:
    """The content of a draft model's cache, with scratch blocks after the target's blocks.

    Args:
        num_blocks: of the target's cache.
        block_size: token slots.
        hidden: states that a head reads; None for a model that reads only tokens. A head's row has
            the token after its position. Its context skips blocks whose hidden states are gone,
            because the served model found them in its own cache.

    Attributes:
        ahead: distance from a row's position to its token: 1 for a head, otherwise 0.
    """

    def __init__(
        self, num_blocks: int, block_size: int, hidden: HiddenStates | None = None
    ) -> None:
        self.block_size = block_size
        self.ahead = 0 if hidden is None else 1
        self._hidden = hidden
        self._num_blocks = num_blocks
        self._num_scratch = scratch_blocks(block_size)
        self.held: dict[int, int] = {}  # content by block
        self._reads: dict[Sequence, _Read] = {}
        self._tails: dict[int, _Tail] = {}  # by slot
        self._copies: list[tuple[int, int]] = []

    def num_rows(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - self.ahead

    def num_skipped(self, sequence: Sequence) -> int:
        return len(self._reads[sequence].holes) * self.block_size

    def num_read(self, sequence: Sequence) -> int | None:
        """Return the leading rows in the cache; never a sequence's last one.

        Schedules a block filled in scratch for the next `take_copies`. None if the next row's
        hidden state is gone: a head waits for the next block.
        """
        size, tokens, table = self.block_size, sequence.token_ids, sequence.block_table
        full = sequence.num_computed // size
        read = self._reads.setdefault(sequence, _Read())
        _extend(read.contents, tokens, full, size, self.ahead)
        if table[: len(read.known)] != read.known:
            read.known = array("i")
            read.holes.clear()
        for place in [one for one in read.holes if self._holds(table[one], read.contents[one])]:
            read.holes.discard(place)
        first = 0 if self._hidden is None else self._hidden.first(sequence)
        begun = 0
        while (place := len(read.known)) < full:
            block, content = table[place], read.contents[place]
            if not self._holds(block, content) and not self._fill(sequence, place, content):
                begun = self._begun(sequence, place, first)
                if begun or place * size >= first:
                    break
                read.holes.add(place)
            read.known.append(block)
        count = len(read.known) * size + begun
        if len(read.known) == full:
            count += self._common(sequence, count)
        count = min(count, self.num_rows(sequence) - 1)
        return None if count < first or count // size in read.holes else count

    def take_copies(self) -> list[tuple[int, int]]:
        """Return source and destination of each block to copy before running anything."""
        copies, self._copies = self._copies, []
        return copies

    def table(self, sequence: Sequence, end: int) -> list[int]:
        """Return the blocks of a sequence's first `end` tokens, drafts included."""
        full = sequence.num_computed // self.block_size
        last = -(-end // self.block_size)
        blocks = sequence.block_table[: min(full, last)].tolist()
        holes = self._reads[sequence].holes
        if holes:
            blocks = [block for place, block in enumerate(blocks) if place not in holes]
        return blocks + [self._scratch(sequence, place) for place in range(full, last)]

    def wrote(self, sequence: Sequence, start: int, token_ids: Ordered[int]) -> None:
        """Record that tokens from a position on were run, after all tokens before them.

        If they end among the full blocks, they end at a block's end.
        """
        size, end = self.block_size, start + len(token_ids)
        full = sequence.num_computed // size
        read = self._reads[sequence]
        for place in range(start // size, min(full, end // size)):
            block = sequence.block_table[place]
            self.held[block] = read.contents[place]
            read.known[place:] = array("i", (block,))
            read.holes.discard(place)
        first = full * size
        if end > first:
            tail = self._tails.get(sequence.slot)
            if tail is None or tail.owner is not sequence or tail.first != first:
                tail = self._tails[sequence.slot] = _Tail(sequence, first, [])
            del tail.token_ids[max(0, start - first) :]
            tail.token_ids += token_ids[max(0, first - start) :]

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence; its full blocks stay, as they do in the target's cache."""
        self._reads.pop(sequence, None)
        if self._hidden is not None:
            self._hidden.end(sequence)
        tail = self._tails.get(sequence.slot)
        if tail is not None and tail.owner is sequence:
            del self._tails[sequence.slot]

    def _scratch(self, sequence: Sequence, place: int) -> int:
        own = (sequence.slot - 1) * self._num_scratch
        return self._num_blocks + own + place % self._num_scratch

    def _common(self, sequence: Sequence, first: int) -> int:
        """Count the tokens from a position on that the scratch blocks hold."""
        tail = self._tails.get(sequence.slot)
        if tail is None or tail.owner is not sequence or tail.first != first:
            return 0
        count = 0
        tokens = sequence.token_ids[first + self.ahead :]
        for held, token_id in zip(tail.token_ids, tokens, strict=False):
            if held != token_id:
                break
            count += 1
        return count

    def _begun(self, sequence: Sequence, place: int, first: int) -> int:
        """Move a head's partial block out of scratch; return its number of rows.

        The hidden states before these rows are gone, so they could not run again.
        """
        begun = self._common(sequence, place * self.block_size)
        if self._hidden is None or not begun or place * self.block_size + begun < first:
            return 0
        self._copies.append((self._scratch(sequence, place), sequence.block_table[place]))
        return begun

    def _holds(self, block: int, content: int) -> bool:
        return self.held.get(block) == content

    def _fill(self, sequence: Sequence, place: int, content: int) -> bool:
        """Fill a block from scratch; return False if scratch lacks some of its tokens."""
        size = self.block_size
        if self._common(sequence, place * size) < size:
            return False
        block = sequence.block_table[place]
        self._copies.append((self._scratch(sequence, place), block))
        self.held[block] = content
        tail = self._tails[sequence.slot]
        tail.first += size
        del tail.token_ids[:size]
        return True


def _extend(contents: list[int], token_ids: list[int], full: int, size: int, ahead: int) -> None:
    """Add the chained hashes of blocks up to a number."""
    for place in range(len(contents), full):
        before = contents[-1] if contents else hash((*token_ids[:ahead],))
        first = place * size + ahead
        contents.append(hash((before, *token_ids[first : first + size])))
