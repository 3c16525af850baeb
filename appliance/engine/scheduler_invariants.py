"""What must hold of a scheduler between two calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.policy import rank
from appliance.engine.sequence import SequenceStatus

if TYPE_CHECKING:
    from appliance.engine.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that every live sequence is in exactly one place and the books agree."""
    waiting, running = [*scheduler._waiting, *scheduler.tiers.reading], scheduler._running
    assert all(seq.status is SequenceStatus.RUNNING for seq in running)
    assert all(seq.status is SequenceStatus.WAITING for seq in waiting)
    assert not any(seq.block_table for seq in waiting)
    assert running == sorted(running, key=rank)
    ended = scheduler._in_flight.check_invariants(running)
    assert len(waiting) == len(scheduler._waiting) + len(scheduler.tiers.reading)
    scheduler.tiers.check_invariants()
    assert len({*running, *waiting}) == len(running) + len(waiting)
    assert {*running, *waiting} == set(scheduler.sequences())
    scheduler._accounts.check_invariants(list(scheduler._waiting.queued()), running)
    scheduler._beams.check_invariants(running)
    holders = [*running, *ended]
    scheduler._admission.check_invariants(holders, scheduler._limits.max_num_seqs)
    scheduler._blocks.check_invariants(holders)
