"""A memory whose slots store what keys and values depend on: the salt and all tokens so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.moves import BlockCopy
from appliance.engine.nouns.plan import ScheduledSequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.sequence import Sequence

Content = tuple[str, tuple[int, ...]]
NOTHING: Content = ("nothing", ())


def truth(sequence: Sequence, position: int) -> Content:
    """What a token's slot must hold."""
    return sequence.request.cache_salt, tuple(sequence.token_ids[: position + 1])


class ContentMemory:
    """Slots of blocks, and of open blocks if blocks are sealed.

    Args:
        blocks: whose tables point here.
        sealed: whether tokens lie in open blocks until their block is full.
    """

    def __init__(self, blocks: BlockManager, sealed: bool) -> None:
        self.slots: dict[tuple[int, int], Content] = {}
        self.opened: dict[tuple[int, int], Content] = {}  # slots of open blocks
        self.blocks, self.sealed = blocks, sealed

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Execute the copies at the start of a plan."""
        for copy in copies:
            for at in range(self.blocks.block_size):
                self.slots[copy.destination, at] = self.slots.get((copy.source, at), NOTHING)
                if self.sealed:
                    content = self.opened.get((copy.open_source, at), NOTHING)
                    self.opened[copy.open_destination, at] = content

    def full(self, block: int) -> list[Content]:
        """The content of a full block."""
        return [self.slots[block, at] for at in range(self.blocks.block_size)]

    def put(self, block: int, contents: list[Content]) -> None:
        """Fill a block from outside, or its open block while it has one."""
        opened = self.blocks.open_block(block)
        for offset, content in enumerate(contents):
            if opened >= 0:
                self.opened[opened, offset] = content
            else:
                self.slots[block, offset] = content

    def place(
        self, sequence: Sequence, position: int
    ) -> tuple[dict[tuple[int, int], Content], tuple[int, int]]:
        """Where a token's content lies: in a block, or in its open block while it has one."""
        index, offset = divmod(position, self.blocks.block_size)
        is_full = (index + 1) * self.blocks.block_size <= sequence.num_computed
        if self.sealed and not is_full:
            entry = ScheduledSequence(sequence, position, 1, samples=False)
            ((opened,),) = self.blocks.open_blocks([entry]) or ()
            return self.opened, (opened, offset)
        return self.slots, (sequence.block_table[index], offset)

    def write(self, sequence: Sequence, num_tokens: int, junk: bool = False) -> None:
        size = self.blocks.block_size
        for position in range(sequence.num_computed, sequence.num_computed + num_tokens):
            memory, place = self.place(sequence, position)
            memory[place] = ("junk", (position,)) if junk else truth(sequence, position)
            if self.sealed and (position + 1) % size == 0:
                block = sequence.block_table[position // size]
                for offset in range(size):
                    self.slots[block, offset] = self.opened.get((place[0], offset), NOTHING)
