"""How a waiting sequence comes to run: a slot and the blocks it can share.

Imports no torch.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from appliance.engine.scheduling.policy import may_admit, may_overtake, rank
from appliance.engine.scheduling.waiting import WaitingQueue
from appliance.engine.sequence import SequenceStatus

if TYPE_CHECKING:
    from appliance.engine.beams.beam_groups import BeamGroups
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.scheduling.counters import Counters
    from appliance.engine.scheduling.draft import Draft
    from appliance.engine.scheduling.fairness import Accounts
    from appliance.engine.scheduling.waiting import Lane
    from appliance.engine.sequence import Sequence
    from appliance.engine.tiers.tiers import Tiers


class Admission:
    """The door between waiting and running.

    Args:
        blocks: the KV cache's books.
        counters: where prefix hits are counted.
        accounts: of all owners.
        tiers: what continues a prefix that is in the cache.
        max_num_seqs: sequences that run at once.
        beams: beam searches, whose sequences start together.

    Attributes:
        waiting: sequences that hold no blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        counters: Counters,
        accounts: Accounts,
        tiers: Tiers,
        max_num_seqs: int,
        beams: BeamGroups,
    ) -> None:
        self.waiting = WaitingQueue(accounts)
        self._blocks = blocks
        self._counters = counters
        self._tiers = tiers
        self._beams = beams
        self._slots = list(range(max_num_seqs, 0, -1))  # 0 is nobody's
        # Of the step that is being planned.
        self._num_promised: int | None = None
        self._num_started = 0  # blocks that those which started have still to get
        self._blocked: list[Sequence] = []

    @property
    def num_slots(self) -> int:
        """Sequences that can start, if there are blocks for them."""
        return len(self._slots)

    def begin_step(self) -> None:
        """Forget who found no room in the last one."""
        self._num_promised = None
        self._num_started = 0
        self._blocked.clear()

    def start(
        self, lane: Lane, draft: Draft, running: list[Sequence], now: float
    ) -> Sequence | None:
        """Start one sequence of a lane; None if there is no room for the one whose turn it is.

        Args:
            lane: whose turn it is.
            draft: the step in which it starts; it gets no rows here.
            running: in the order of rank; the one that starts is added.
            now: monotonic seconds.
        """
        if draft.preempted or not (self._slots and lane.sequences):
            return None  # blocks that were taken from someone are not for newcomers
        sequence = lane.next(self._num_cached)
        if not may_overtake(sequence, self._blocked):
            return None
        if self._num_promised is None:
            growing = [one for one in running if one not in self._beams.held]
            missing = sum(map(self._blocks.num_missing, growing))
            self._num_promised = missing + len(running)
        members = self._beams.members(sequence)
        num_promised = self._num_promised + self._beams.num_beside(sequence)
        if len(members) > len(self._slots) or not self._start_table(sequence, num_promised, draft):
            self._blocked.append(sequence)
            return None
        for other in self._blocked:
            other.num_overtaken += 1
        lane.overtake(sequence)
        for member in members:
            self.waiting.remove(member)
            member.status = SequenceStatus.RUNNING
            if member is not sequence:
                member.slot = self._slots.pop()
            insort(running, member, key=rank)
            if member.first_scheduled is None:
                member.first_scheduled = now
                if member.index == 0:
                    draft.started.append(member.request.request_id)
        self._beams.start(sequence)
        lane.account.num_running += len(members)
        self._num_promised += len(members)
        return sequence

    def release(self, sequence: Sequence) -> None:
        """Take the blocks and the slot of a sequence that nothing in flight needs any more."""
        self._tiers.offer(sequence)
        self._blocks.free(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = 0

    def _num_cached(self, sequence: Sequence) -> int:
        """Tokens that the sequence would not have to compute."""
        if self._can_fork(sequence):
            return sequence.num_prompt_tokens
        num_tokens = self._blocks.find_prefix(sequence).num_tokens
        return max(num_tokens, self._tiers.num_held(sequence))

    def _can_fork(self, sequence: Sequence) -> bool:
        parent = sequence.parent
        return (
            parent is not None
            and sequence.first_scheduled is None
            and parent.status is SequenceStatus.RUNNING
            and parent.num_computed >= sequence.num_prompt_tokens
            and not self._tiers.is_loading(parent)  # what it has of them is not there yet
        )

    def _start_table(self, sequence: Sequence, num_promised: int, draft: Draft) -> bool:
        """Share the parent's prompt, or what the prefix cache has, if all the rest fits too.

        What the tiers below have of the rest is loaded with the step.
        """
        blocks = self._blocks
        num_prompt_tokens = sequence.num_prompt_tokens
        num_free = blocks.num_free_blocks - self._num_started
        if self._can_fork(sequence):
            parent = sequence.parent
            assert parent is not None
            # Logits need the last prompt token to run again: one block, copied or new, is its own.
            if not may_admit(1, num_free, num_promised):
                return False
            sequence.slot = self._slots.pop()
            blocks.fork(parent, sequence, num_prompt_tokens - 1)
            self._num_started += 1
            sequence.num_cached = parent.num_cached
            return True
        prefix = self._tiers.choose(sequence, blocks.find_prefix(sequence))
        cost = blocks.cost_of_admission(sequence, prefix)
        if not may_admit(cost, num_free, num_promised):
            # A copy takes a block more than no hit at all.
            prefix = blocks.without_copy(prefix)
            cost = blocks.cost_of_admission(sequence, prefix)
            if not may_admit(cost, num_free, num_promised):
                return False
        sequence.slot = self._slots.pop()
        num_free = blocks.num_free_blocks
        blocks.attach(sequence, prefix)
        draft.arrivals[sequence] = self._tiers.bring_back(sequence)
        self._num_started += cost - (num_free - blocks.num_free_blocks)
        if sequence.first_scheduled is None:
            sequence.num_cached = sequence.num_computed
            self._counters.prefix_queries += num_prompt_tokens
            self._counters.prefix_hits += sequence.num_cached
        return True

    def check_invariants(self, holders: list[Sequence], max_num_seqs: int) -> None:
        """Assert that every slot is free or belongs to one of those that hold blocks."""
        used = [sequence.slot for sequence in holders]
        assert sorted(used + self._slots) == list(range(1, max_num_seqs + 1))
