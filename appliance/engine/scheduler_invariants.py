"""What must hold of a scheduler between two calls."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from appliance.engine.policy import rank
from appliance.engine.sequence import SequenceStatus

if TYPE_CHECKING:
    from appliance.engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that every live sequence is in exactly one place and the books agree."""
    waiting, running = [*scheduler._waiting, *scheduler.tiers.reading], scheduler._running
    ended = [seq for seq in scheduler._in_flight if seq.status is SequenceStatus.FINISHED]
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
    assert not any(seq.block_table for seq in waiting)
    assert running == sorted(running, key=rank)
    assert set(scheduler._in_flight) <= {*running, *ended}
    for seq, entries in scheduler._in_flight.items():
        assert 0 < len(entries) <= 1 + scheduler._look_ahead
        assert all(a.end == b.start for a, b in pairwise(entries))
        if seq.status is SequenceStatus.RUNNING:
            assert entries[0].start == seq.num_computed
            assert len(seq.token_ids) >= entries[0].end
    assert len(waiting) == len(scheduler._waiting) + len(scheduler.tiers.reading)
    scheduler.tiers.check_invariants()
    assert len({*running, *waiting}) == len(running) + len(waiting)
    assert {*running, *waiting} == set(scheduler.sequences())
    scheduler._accounts.check_invariants(list(scheduler._waiting.queued()), running)
    scheduler._beams.check_invariants(running)
    holders = [*running, *ended]
    scheduler._admission.check_invariants(holders, scheduler._limits.max_num_seqs)
    scheduler._blocks.check_invariants(holders)
