"""Converts the scheduler's updates to deltas for clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.grammars.matchers import NO_WAY_ON
from appliance.engine.messages import SequenceDelta
from appliance.engine.request import FinishReason
from appliance.engine.scheduling.deadlines import was_started, why_refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.engine.plan import Update
    from appliance.engine.sequence import Sequence


def deltas_of(updates: Iterable[Update]) -> tuple[SequenceDelta, ...]:
    """Return a delta for each update of a sequence that the client knows."""
    return tuple([_delta(update) for update in updates if _is_choice(update.sequence)])


def overdue(updates: Iterable[Update], now: float) -> list[SequenceDelta]:
    """Return the final deltas of expired sequences: errors for requests that never started.

    Args:
        now: on the clock of their arrival.
    """
    return [
        _delta(update) if update.token_ids else _late(update.sequence, now)
        for update in updates
        if _is_choice(update.sequence)
    ]


def _delta(update: Update) -> SequenceDelta:
    (
        sequence,
        token_ids,
        finish_reason,
        logprobs,
        cumulative_logprob,
        error,
        prompt_logprobs,
        pooled,
    ) = update
    if error is not None:
        return SequenceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            finish_reason=finish_reason,
            error=error,
            refused=error.startswith(NO_WAY_ON),
        )
    is_search = cumulative_logprob is not None  # a search shows nothing before its end
    first = sequence.index == 0 if is_search else sequence.num_output_tokens == len(token_ids)
    if prompt_logprobs is not None or pooled is not None:
        first = False  # more is to come
    return SequenceDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        num_cached_tokens=sequence.num_cached,
        num_draft_tokens=sequence.num_drafts,
        num_accepted_tokens=sequence.num_accepted,
        queue_seconds=_waited(sequence) if first else None,
        cumulative_logprob=cumulative_logprob,
        prompt_logprobs=prompt_logprobs,
        pooled=pooled,
    )


def _late(sequence: Sequence, now: float) -> SequenceDelta:
    started = was_started(sequence)
    return SequenceDelta(
        request_id=sequence.request.request_id,
        index=sequence.index,
        finish_reason=FinishReason.TIMEOUT if started else FinishReason.ERROR,
        error=None if started else why_refused(sequence.request, now - sequence.arrival),
        expired=not started,
        num_cached_tokens=sequence.num_cached,
    )


def _is_choice(sequence: Sequence) -> bool:
    """Return True if the client knows the sequence: a search may have more beams than answers."""
    return sequence.index < sequence.request.sampling.num_choices


def _waited(sequence: Sequence) -> float:
    first = sequence.first_scheduled
    return 0.0 if first is None else first - sequence.arrival
