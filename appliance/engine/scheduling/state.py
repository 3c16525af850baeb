"""The scheduler's state: every live sequence waits, reads from disk, runs or is in flight.

The phases of a step read this one object and move sequences through its methods, which keep lists,
slots and accounts consistent. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.counters import Counters
from appliance.engine.scheduling.deadlines import Deadlines
from appliance.engine.scheduling.fairness import Accounts
from appliance.engine.scheduling.policy import rank
from appliance.engine.scheduling.step_budget import Stalls, StepBudget
from appliance.engine.scheduling.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.request import FinishReason
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.nouns.sequence_group import SequenceGroup
    from appliance.engine.scheduling.in_flight import InFlight
    from appliance.engine.tiers.tiers import Tiers


@dataclass(slots=True, eq=False)
class State:
    """The scheduler's memory.

    Attributes:
        bounds: limits of a step, and where answers end.
        groups: those with live members, by request, in order of arrival.
        waiting: startable sequences without blocks, and their parked siblings.
        running: those with a slot, in rank order.
        slots: free ones; each running sequence has one; 0 is never used.
        budget: sizes the prompt rows beside answers.
        stalls: saved-up steps that prompts may have for themselves.
    """

    blocks: BlockManager
    tiers: Tiers
    bounds: Bounds
    in_flight: InFlight
    groups: dict[str, SequenceGroup] = field(default_factory=dict)
    accounts: Accounts = field(default_factory=Accounts)
    waiting: WaitingQueue = field(init=False)
    running: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(init=False)
    deadlines: Deadlines = field(default_factory=Deadlines)
    budget: StepBudget = field(default_factory=StepBudget)
    stalls: Stalls = field(default_factory=Stalls)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(self.accounts)
        self.slots = list(range(self.bounds.limits.max_num_seqs, 0, -1))

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.tiers.reading)

    def sequences(self) -> Iterator[Sequence]:
        """Iterate over all live sequences, by request in order of arrival."""
        for group in self.groups.values():
            yield from group.live

    def enter(self, group: SequenceGroup) -> None:
        """Queue a new group; siblings wait until their shared prompt is computed."""
        self.groups[group.request.request_id] = group
        self.accounts.open(group.request.owner, len(group.live))
        parent, *children = group.live
        self.wait(parent)
        self.waiting.park(parent, children)
        for sequence in group.live:
            self.deadlines.add(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence, after reading its content from disk if there is any."""
        if not self.tiers.begin_reading(sequence):
            self.waiting.push(sequence)

    def wake(self, now: float) -> None:
        """Queue the sequences whose disk reads have ended, or take too long."""
        for sequence in self.tiers.take_read(now):
            self.waiting.push(sequence)

    def run(self, sequence: Sequence, now: float) -> bool:
        """Move a waiting sequence to the running ones; return True the first time."""
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=rank)
        self.accounts.of(sequence).num_running += 1
        if sequence.first_scheduled is not None:
            return False
        sequence.first_scheduled = now
        return True

    def requeue(self, sequence: Sequence) -> None:
        """Take the blocks of a running unit; its tokens are recomputed later."""
        sequence.group.lose()
        leader, *others = sequence.group.unit(sequence)
        for member in (leader, *others):
            self._stop(member)
            member.status = SequenceStatus.WAITING
        self.wait(leader)
        if others:
            self.waiting.park(leader, others)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        was_reading = self.tiers.forget(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        elif not was_reading:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        sequence.is_held = False
        self.waiting.unpark(sequence)
        self.accounts.close(sequence)
        live = sequence.group.live
        live.remove(sequence)
        if not live:
            del self.groups[sequence.request.request_id]

    def release(self, sequence: Sequence) -> None:
        """Free the blocks and the slot of a sequence that nothing in flight uses."""
        self.tiers.offer(sequence)
        self.blocks.free(sequence)
        self.slots.append(sequence.slot)
        sequence.slot = 0

    def _stop(self, sequence: Sequence) -> None:
        index = bisect_left(self.running, rank(sequence), key=rank)
        assert self.running[index] is sequence
        del self.running[index]
        self.accounts.of(sequence).num_running -= 1
        if sequence not in self.in_flight.entries:
            self.release(sequence)

    def check_invariants(self) -> None:
        """Assert that every live sequence is in exactly one place and the records agree."""
        waiting, running = [*self.waiting, *self.tiers.reading], self.running
        assert all(seq.status is SequenceStatus.RUNNING for seq in running)
        assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
        assert not any(seq.block_table for seq in waiting)
        assert running == sorted(running, key=rank)
        ended = self.in_flight.check_invariants(running)
        assert len(waiting) == self.num_waiting
        self.tiers.check_invariants()
        assert len({*running, *waiting}) == len(running) + len(waiting)
        assert {*running, *waiting} == set(self.sequences())
        self.accounts.check_invariants(list(self.sequences()), list(self.waiting.queued()), running)
        for group in self.groups.values():
            assert group.live, "a group without live members is remembered"
            group.check_invariants()
        holders = [*running, *ended]
        used = [sequence.slot for sequence in holders]
        slots = list(range(1, self.bounds.limits.max_num_seqs + 1))
        assert sorted(used + self.slots) == slots, "a slot is lost, or two have it"
        self.blocks.check_invariants(holders)
