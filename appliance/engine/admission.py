"""How a waiting sequence comes to run: a slot, the blocks it can share, and its first rows.

Imports no torch.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from appliance.engine.policy import may_admit, rank
from appliance.engine.sequence import SequenceStatus
from appliance.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from appliance.engine.beam_groups import BeamGroups
    from appliance.engine.block_manager import BlockManager
    from appliance.engine.counters import Counters
    from appliance.engine.draft import Draft
    from appliance.engine.sequence import Sequence


class Admission:
    """The door between waiting and running.

    Args:
        blocks: the KV cache's books.
        counters: where prefix hits are counted.
        max_num_seqs: sequences that run at once.
        beams: beam searches, whose sequences start together.

    Attributes:
        waiting: sequences that hold no blocks.
    """

    def __init__(
        self, blocks: BlockManager, counters: Counters, max_num_seqs: int, beams: BeamGroups
    ) -> None:
        self.waiting = WaitingQueue()
        self._blocks = blocks
        self._counters = counters
        self._beams = beams
        self._slots = list(range(max_num_seqs, 0, -1))  # 0 is nobody's

    def admit(self, draft: Draft, running: list[Sequence], now: float) -> None:
        """Start waiting sequences in the order of rank until one does not fit.

        Args:
            draft: the step they get rows in.
            running: in the order of rank; those that start are added.
            now: monotonic seconds.
        """
        if not (draft.budget and self._slots and self.waiting):
            return
        num_promised = sum(map(self._promise, running))
        while draft.budget and self._slots and (sequence := self.waiting.peek()) is not None:
            members = self._beams.members(sequence)
            if len(members) > len(self._slots):
                return
            if not self._start_table(sequence, num_promised + self._beams.num_beside(sequence)):
                return
            for member in members:
                self.waiting.remove(member)
                member.status = SequenceStatus.RUNNING
                insort(running, member, key=rank)
                if member is not sequence:
                    member.slot = self._slots.pop()
                if member.first_scheduled is None:
                    member.first_scheduled = now
                    if member.index == 0:
                        draft.started.append(member.request.request_id)
            self._beams.start(sequence)
            num_tokens = min(sequence.num_uncomputed, draft.budget)
            copies = self._blocks.allocate(sequence, num_tokens)
            assert copies is not None, "admitted without the blocks for it"
            draft.add(sequence, num_tokens, copies)
            num_promised += sum(map(self._promise, members))

    def _promise(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still needs, or one to grow into."""
        if sequence in self._beams.held:
            return 1
        return max(1, self._blocks.num_missing(sequence))

    def release(self, sequence: Sequence) -> None:
        """Take the blocks and the slot of a sequence that nothing in flight needs any more."""
        self._blocks.free(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = 0

    def _start_table(self, sequence: Sequence, num_promised: int) -> bool:
        """Share the parent's prompt, or what the prefix cache has, if all the rest fits too."""
        blocks = self._blocks
        parent = sequence.parent
        num_prompt_tokens = sequence.num_prompt_tokens
        if (
            parent is not None
            and sequence.first_scheduled is None
            and parent.status is SequenceStatus.RUNNING
            and parent.num_computed >= num_prompt_tokens
        ):
            # Logits need the last prompt token to run again: one block, copied or new, is its own.
            if not may_admit(1, blocks.num_free_blocks, num_promised):
                return False
            sequence.slot = self._slots.pop()
            blocks.fork(parent, sequence, num_prompt_tokens - 1)
            sequence.num_cached = parent.num_cached
            return True
        prefix = blocks.find_prefix(sequence)
        cost = blocks.cost_of_admission(sequence, prefix)
        if not may_admit(cost, blocks.num_free_blocks, num_promised):
            return False
        sequence.slot = self._slots.pop()
        blocks.attach(sequence, prefix)
        if sequence.first_scheduled is None:
            sequence.num_cached = sequence.num_computed
            self._counters.prefix_queries += num_prompt_tokens
            self._counters.prefix_hits += sequence.num_cached
        return True

    def check_invariants(self, holders: list[Sequence], max_num_seqs: int) -> None:
        """Assert that every slot is free or belongs to one of those that hold blocks."""
        used = [sequence.slot for sequence in holders]
        assert sorted(used + self._slots) == list(range(1, max_num_seqs + 1))
