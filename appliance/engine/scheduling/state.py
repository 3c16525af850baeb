"""The scheduler's state: every live sequence waits, reads from disk, runs or is in flight.

The phases of a step read this one object and move sequences through its methods, which keep lists,
slots, accounts and counters consistent. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.nouns.plan import Plan
from appliance.engine.nouns.sequence import SequenceStatus
from appliance.engine.scheduling.deadlines import Deadlines
from appliance.engine.scheduling.policy import MAX_DRAFTS, may_look_ahead, rank
from appliance.engine.scheduling.step_budget import Stalls, StepBudget
from appliance.engine.scheduling.waiting import Accounts, WaitingQueue
from appliance.stats import EngineStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.blocks.state_slots import StateSlots
    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.request import FinishReason
    from appliance.engine.nouns.sequence import Sequence, SequenceGroup
    from appliance.engine.scheduling.policy import Rank
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
    counters: Counters = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = WaitingQueue(self.accounts)
        self.counters = Counters()
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


class InFlight:
    """Entries of plans in flight; some of the sequences may have ended since.

    Args:
        look_ahead: a sequence may be in two plans at once.

    Attributes:
        entries: by sequence, oldest first; never empty.
        starved: best rank among sequences that found no block and no victim.
    """

    def __init__(self, max_tokens: int, *, look_ahead: bool) -> None:
        self.entries: dict[Sequence, list[ScheduledSequence]] = {}
        self.starved: Rank | None = None
        self._look_ahead = look_ahead
        self._max_tokens = max_tokens

    def add(self, entries: Iterable[ScheduledSequence]) -> None:
        for entry in entries:
            self.entries.setdefault(entry.sequence, []).append(entry)

    def remove(self, entry: ScheduledSequence) -> bool:
        """Remove a finished plan's entry; return True if its sequence has none left in flight."""
        own = self.entries[entry.sequence]
        assert own.pop(0) is entry, "plans are committed in the order they were made in"
        if own:
            return False
        del self.entries[entry.sequence]
        return True

    @property
    def has_drafts(self) -> bool:
        """True if the next rows of some sequence depend on what is accepted."""
        return any(entry.drafts for own in self.entries.values() for entry in own)

    def clear(self) -> list[Sequence]:
        """Remove all entries; return their sequences in rank order."""
        sequences = sorted(self.entries, key=rank)
        self.entries.clear()
        return sequences

    def starve(self, sequence: Sequence) -> None:
        """Record that a sequence found no block and no victim."""
        self.starved = min(self.starved or rank(sequence), rank(sequence))

    def num_left(self, sequence: Sequence) -> int:
        """Count a sequence's plannable rows, the next token's included; 0 if it must wait."""
        own = self.entries[sequence]
        if not self._look_ahead or len(own) > 1:
            return 0
        if self.starved is not None and rank(sequence) > self.starved:
            return 0  # once idle, its blocks can be taken
        first = own[0]
        end = first.start + first.num_tokens
        if not first.samples:
            return len(sequence.token_ids) - end
        is_last = end + 1 >= sequence.max_tokens or end + 1 >= self._max_tokens
        if is_last or not may_look_ahead(sequence):
            return 0
        return len(sequence.token_ids) + 1 - end

    def check_invariants(self, running: list[Sequence]) -> list[Sequence]:
        """Assert that the entries are consistent; return the ended sequences."""
        ended = [seq for seq in self.entries if seq.status is SequenceStatus.FINISHED]
        assert set(self.entries) <= {*running, *ended}
        for sequence, own in self.entries.items():
            assert 0 < len(own) <= 1 + self._look_ahead
            assert all(a.end == b.start for a, b in pairwise(own))
            if sequence.status is SequenceStatus.RUNNING:
                assert own[0].start == sequence.num_computed
                assert len(sequence.token_ids) >= own[0].end - len(own[0].drafts)
        return ended


@dataclass(slots=True)
class Counters:
    """Totals since the engine was loaded; tokens unless noted."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0  # sequences
    aborted: int = 0  # requests
    expired: int = 0  # requests
    drafts: int = 0  # sequences with drafts, per step
    draft_tokens: int = 0
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)  # by position
    last_plan: Plan = field(default_factory=lambda: Plan(()))

    def count_drafts(self, entry: ScheduledSequence, num_accepted: int) -> None:
        entry.sequence.num_drafts += len(entry.drafts)
        entry.sequence.num_accepted += num_accepted
        self.drafts += 1
        self.draft_tokens += len(entry.drafts)
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def snapshot(self, blocks: BlockManager, running: int, waiting: int) -> EngineStats:
        """Return the scheduler's part of the statistics; the engine adds times."""
        last = self.last_plan
        return EngineStats(
            steps_total=self.steps,
            running=running,
            waiting=waiting,
            prompt_tokens_total=self.prompt_tokens,
            generation_tokens_total=self.generation_tokens,
            prefix_queries_total=self.prefix_queries,
            prefix_hits_total=self.prefix_hits,
            preemptions_total=self.preemptions,
            aborted_total=self.aborted,
            expired_total=self.expired,
            blocks_total=blocks.num_blocks,
            blocks_active=blocks.num_active,
            blocks_cached=blocks.num_cached,
            blocks_free=blocks.num_free_blocks - blocks.num_cached,
            blocks_shared=blocks.pool.num_shared,
            block_size=blocks.block_size,
            kv_tokens=blocks.pool.kv_tokens,
            step_prefill_tokens=last.num_tokens - last.num_decode_tokens,
            step_decode_tokens=last.num_decode_tokens,
            drafts_total=self.drafts,
            draft_tokens_total=self.draft_tokens,
            accepted_tokens_total=sum(self.accepted_at),
            accepted_tokens_by_place=tuple(self.accepted_at) if self.drafts else (),
        )


def add_states(stats: EngineStats, states: StateSlots | None) -> EngineStats:
    """Add slots and checkpoints to a snapshot that has the number of running sequences."""
    if states is None:
        return stats
    checkpoints = states.checkpoints
    return msgspec.structs.replace(
        stats,
        state_slots=states.num_slots,
        state_slots_used=stats.running,
        state_checkpoints=checkpoints.num_rows,
        state_checkpoints_cached=len(checkpoints),
        state_bytes=states.row_bytes,
        state_saves_total=states.num_saved,
        state_restores_total=states.num_restored,
        state_rewinds_total=states.num_rewound,
        state_evictions_total=checkpoints.num_evictions,
    )
