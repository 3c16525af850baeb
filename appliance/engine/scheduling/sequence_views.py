"""Describes live sequences for the dashboard. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import Table
from appliance.engine.nouns.sequence import SequenceStatus
from appliance.stats import SequenceView

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.scheduling.scheduler import Scheduler
    from appliance.engine.tiers.tiers import Tiers


def view_sequences(scheduler: Scheduler, tiers: Tiers, now: float) -> tuple[SequenceView, ...]:
    """Describe all waiting and running sequences, by request in order of arrival.

    Args:
        now: on the clock of their arrival.
    """
    reading = frozenset(tiers.reading)
    return tuple(
        SequenceView(
            request_id=sequence.request.request_id,
            index=sequence.index,
            slot=sequence.slot,
            owner=sequence.request.owner,
            adapter="" if sequence.request.adapter is None else sequence.request.adapter.name,
            status=_status(sequence, held=sequence.is_held, reads=sequence in reading),
            prompt_tokens=sequence.num_prompt_tokens,
            picture_rows=_picture_rows(sequence.request),
            cached_tokens=sequence.num_cached,
            output_tokens=sequence.num_output_tokens,
            blocks=len(sequence.block_table),
            age_seconds=now - sequence.arrival,
            computed_tokens=sequence.num_computed,
            preemptions=sequence.num_preemptions,
            kept_tokens=sequence.num_kept,
            draft_tokens=sequence.num_drafts,
            accepted_tokens=sequence.num_accepted,
            host_blocks=tiers.num_in_host(sequence),
        )
        for sequence in scheduler.sequences()
    )


def _picture_rows(request: Request) -> int:
    return 0 if request.pictures is None else request.pictures.num_rows


def _status(sequence: Sequence, *, held: bool, reads: bool) -> str:
    if sequence.status is SequenceStatus.RUNNING:
        return "to fork" if held else "running"
    if reads:
        return "reading"
    if sequence.num_kept:
        return "swapped"
    return "preempted" if sequence.num_preemptions else "waiting"


def view_table(scheduler: Scheduler, request_id: str, index: int, block_size: int) -> Table:
    """Describe one sequence's block table; an empty one if it is not live."""
    for sequence in scheduler.sequences():
        if (sequence.request.request_id, sequence.index) == (request_id, index):
            num_full = sequence.num_computed // block_size
            return Table(
                request_id=request_id,
                index=index,
                num_tokens=sequence.num_computed,
                blocks=tuple(sequence.block_table),
                hashes=b"".join(sequence.block_hashes[:num_full]),
            )
    return Table(request_id=request_id, index=index)
