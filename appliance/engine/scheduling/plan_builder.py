"""A plan in the making; entries can be withdrawn. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from appliance.engine.nouns.moves import StateMoves
from appliance.engine.nouns.plan import Plan, ScheduledSequence
from appliance.engine.scheduling.policy import gets_checkpoint

if TYPE_CHECKING:
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.moves import BlockCopy
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.tiers.planned_moves import Arrival
    from appliance.engine.tiers.tiers import Tiers


@dataclass(slots=True)
class PlanBuilder:
    """Collects entries within a budget of rows."""

    budget: int  # rows left
    now: float = 0.0  # monotonic seconds
    entries: dict[Sequence, ScheduledSequence] = field(default_factory=dict)
    copies: dict[Sequence, tuple[BlockCopy, ...]] = field(default_factory=dict)
    started: list[Sequence] = field(default_factory=list)  # for the first time
    preempted: list[Sequence] = field(default_factory=list)
    arrivals: dict[Sequence, list[Arrival]] = field(default_factory=dict)

    # For admission: blocks that running sequences still need, blocks owed to sequences that start
    # in this step, and sequences without room.
    num_promised: int | None = None
    num_owed: int = 0
    blocked: list[Sequence] = field(default_factory=list)

    def add(
        self,
        sequence: Sequence,
        num_tokens: int,
        copies: tuple[BlockCopy, ...],
        before: ScheduledSequence | None = None,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Schedule the next `num_tokens` rows of a sequence, after those in flight, plus drafts."""
        start = sequence.num_computed if before is None else before.end
        known, end = len(sequence.token_ids), start + num_tokens
        samples = end == (known if before is None else known + before.samples)
        follows = end > known
        assert not follows or (samples and num_tokens == 1)
        entry = ScheduledSequence(sequence, start, num_tokens, samples, follows)
        if sequence.to_read:
            entry = entry._replace(read=sequence.rows_to_read(start, end))
        if drafts:
            entry = entry._replace(num_tokens=num_tokens + len(drafts), drafts=drafts)
        self.entries[sequence] = entry
        self.budget -= entry.num_tokens
        if copies:
            self.copies[sequence] = copies

    def take_back(self, sequence: Sequence) -> None:
        """Undo `add` for a sequence, if called, and its start if this was the first."""
        if sequence in self.started:
            self.started.remove(sequence)
            sequence.first_scheduled = None
        entry = self.entries.pop(sequence, None)
        if entry is not None:
            self.budget += entry.num_tokens
        self.copies.pop(sequence, None)
        self.arrivals.pop(sequence, None)

    def num_rows(self, sequence: Sequence) -> int:
        entry = self.entries.get(sequence)
        return 0 if entry is None else entry.num_tokens

    def finished(self, blocks: BlockManager, tiers: Tiers) -> Plan:
        entries = list(self.entries.values())
        scheduled = tuple([entry for entry in entries if entry.num_tokens == 1])
        if len(scheduled) < len(entries):
            scheduled += tuple([entry for entry in entries if entry.num_tokens > 1])
        states = blocks.states
        if states is not None:  # before the tiers: blocks that checkpoints evict may go there
            size = blocks.block_size
            wanted = [entry for entry in scheduled if gets_checkpoint(entry, size)]
            copies, checkpoints = states.plan(wanted)
        arrivals = list(chain.from_iterable(self.arrivals.values())) if self.arrivals else ()
        moves = tiers.take_moves(arrivals)
        return Plan(
            scheduled=scheduled,
            copies=tuple(copy for copies in self.copies.values() for copy in copies),
            started=tuple([one.request.request_id for one in self.started if one.index == 0]),
            preempted=tuple(self.preempted),
            open_blocks=blocks.open_blocks(scheduled),
            saves=moves.saves,
            loads=moves.loads,
            states=None
            if states is None
            else StateMoves(
                saves=moves.state_saves,
                loads=moves.state_loads,
                copies=copies,
                checkpoints=checkpoints,
                ended=states.take_ended(copies),
            ),
        )
