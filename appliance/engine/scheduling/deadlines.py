"""Deadlines for starting and ending requests. Imports no torch."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request
    from appliance.engine.nouns.sequence import Sequence

_SPARE = 64  # entries of ended sequences before a cleanup


class Deadlines:
    """Deadlines of sequences, earliest first."""

    def __init__(self) -> None:
        # Time, a number that keeps heapq from comparing sequences, True for the queue's deadline.
        self.entries: list[tuple[float, int, bool, Sequence]] = []
        self._count = 0
        self._limit = _SPARE

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.timeout is not None:
            self._push(sequence.arrival + request.timeout, sequence, in_queue=False)
        if request.max_queue_seconds is not None:
            self._push(sequence.arrival + request.max_queue_seconds, sequence, in_queue=True)

    def take(self, now: float) -> list[Sequence]:
        """Return live sequences past a deadline, each once."""
        over: dict[Sequence, None] = {}
        while self.entries and self.entries[0][0] <= now:
            _, _, in_queue, sequence = heapq.heappop(self.entries)
            if sequence.finish_reason is None and not (in_queue and was_started(sequence)):
                over[sequence] = None
        return list(over)

    def _push(self, when: float, sequence: Sequence, *, in_queue: bool) -> None:
        self._count += 1
        heapq.heappush(self.entries, (when, self._count, in_queue, sequence))
        if len(self.entries) > self._limit:
            self.entries = [entry for entry in self.entries if entry[3].finish_reason is None]
            heapq.heapify(self.entries)
            self._limit = 2 * len(self.entries) + _SPARE


def was_started(sequence: Sequence) -> bool:
    """Return True if any part of the sequence's request was computed."""
    return any(
        one is not None and one.first_scheduled is not None for one in (sequence, sequence.parent)
    )


def overdue(request: Request, arrival: float, now: float) -> list[SequenceDelta]:
    """Return the final deltas of a request that has waited too long before the queue, else none.

    Args:
        now: on the clock of its arrival.
    """
    waited = now - arrival
    limits = (request.timeout, request.max_queue_seconds)
    if all(limit is None or waited < limit for limit in limits):
        return []
    return [
        SequenceDelta(
            request_id=request.request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            error=why_refused(request, waited),
            expired=True,
        )
        for index in range(request.sampling.num_choices)
    ]


def why_refused(request: Request, waited: float) -> str:
    """Explain to a client why its request never started."""
    timeout, limit = request.timeout, request.max_queue_seconds
    if limit is None or (timeout is not None and timeout < limit):
        return (
            f"the request was not started within its timeout of {timeout:g} s and nothing was "
            "computed; try again later, or with a longer timeout"
        )
    return (
        f"the request waited {waited:.1f} s, longer than the {limit:g} s that this server lets "
        "one wait, and nothing was computed; try again later"
    )
