"""Rows of recurrent state that store all tokens before them, and the effect of steps on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.simulation.content_memory import NOTHING, Content, truth

from appliance.engine.nouns.plan import ScheduledSequence
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Iterable

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import StateCopy

JUNK: Content = ("junk", ())


def make(tokens: Iterable[int], salt: str) -> Sequence:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(),
        cache_salt=salt,
    )
    return Sequence(request)


class ContentStates:
    """A model's states, if it has any.

    Args:
        blocks: whose `states` point here.
        shuffle: chooses the boundaries that get a checkpoint.
        seen: how often each notable case came up.
    """

    def __init__(self, blocks: BlockManager, shuffle: random.Random, seen: Counter[str]) -> None:
        self.blocks, self.slots, self._evicted = blocks, blocks.states, 0
        self.shuffle, self.seen = shuffle, seen
        self.rows = [NOTHING] * (0 if blocks.states is None else blocks.states.num_rows)

    def step(self, plan: Iterable[tuple[Sequence, int]], *, fails: bool = False) -> None:
        """Run a step of sequences with so many rows each, without committing it."""
        if self.slots is None:
            return
        entries = [ScheduledSequence(one, one.num_computed, rows, False) for one, rows in plan]
        ends = [entry for entry in entries if entry.end % self.blocks.block_size == 0]
        before, after = self.slots.plan([one for one in ends if self.shuffle.random() < 0.7])
        self.seen["states restored or forked"] += len(before)
        self._copy(before, fails=fails)
        for entry in entries:
            row, sequence = self.slots.row(entry.sequence), entry.sequence
            if entry.start and not fails:
                assert self.rows[row] == truth(sequence, entry.start - 1), "a wrong state"
            self.rows[row] = JUNK if fails else truth(sequence, entry.end - 1)
        self._copy(after, fails=fails)

    def settle(self) -> None:
        if self.slots is not None:
            self.slots.settle()

    def discard(self) -> list[Sequence]:
        """Discard a step that failed; return the sequences whose states may be wrong."""
        return [] if self.slots is None else self.slots.discard_plans()

    def check(self) -> None:
        """Check that each state that can be found is that of its hash."""
        if self.slots is None:
            return
        size = self.blocks.block_size
        for content in self.slots.checkpoints:
            checkpoint = self.slots.checkpoints.get(content)
            assert checkpoint is not None
            salt, tokens = self.rows[checkpoint.row]
            sequence = make(tokens, salt)
            self.blocks.index.extend_hashes(sequence, len(tokens) // size)
            assert sequence.block_hashes[-1:] == [content], "a checkpoint was written later"
            self.seen["checkpoints"] += 1
        evicted = self.slots.checkpoints.num_evictions
        self.seen["evicted checkpoints"] += evicted - self._evicted
        self._evicted = evicted

    def _copy(self, copies: tuple[StateCopy, ...], *, fails: bool) -> None:
        for copy in copies:
            self.rows[copy.destination] = JUNK if fails else self.rows[copy.source]
