"""An encoder's queue of texts, with fair turns. Imports no torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import SequenceDelta
from appliance.engine.nouns.request import FinishReason
from appliance.engine.scheduling.deadlines import why_refused
from appliance.stats import SequenceView

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request


@dataclass(frozen=True, slots=True)
class WaitingText:
    request: Request
    arrival: float  # monotonic seconds

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class TextQueue:
    """Texts in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, WaitingText] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now: float) -> None:
        self._waiting[request.request_id] = WaitingText(request, now)

    def forget(self, request_id: str) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def expire(self, now: float) -> tuple[SequenceDelta, ...]:
        """Remove and answer the requests that waited too long."""
        over = [
            one
            for one in self._waiting.values()
            for limit in (one.request.timeout, one.request.max_queue_seconds)
            if limit is not None and now - one.arrival >= limit
        ]
        deltas = {}
        for one in over:
            name = one.request.request_id
            self._waiting.pop(name, None)
            deltas[name] = SequenceDelta(
                request_id=name,
                finish_reason=FinishReason.ERROR,
                error=why_refused(one.request, now - one.arrival),
                expired=True,
            )
        return tuple(deltas.values())

    def take(self, max_texts: int, max_tokens: int) -> list[WaitingText]:
        """Remove the next texts, most urgent first and at least one, sorted by length.

        Within a priority, the owner with least of this step is next, so that a client with many
        texts does not keep others waiting.
        """
        queues: dict[tuple[int, str], deque[WaitingText]] = {}
        for one in self._waiting.values():
            queues.setdefault((one.request.priority, one.request.owner), deque()).append(one)
        taken: list[WaitingText] = []
        had = dict.fromkeys(queues, 0)
        while queues and len(taken) < max_texts:
            key = min(queues, key=lambda one: (one[0], had[one]))
            if taken and sum(had.values()) + queues[key][0].num_tokens > max_tokens:
                break
            one = queues[key].popleft()
            taken.append(one)
            had[key] += one.num_tokens
            del self._waiting[one.request.request_id]
            if not queues[key]:
                del queues[key]
        return sorted(taken, key=lambda one: one.num_tokens)

    def views(self, now: float) -> tuple[SequenceView, ...]:
        """Describe all texts for dashboards."""
        return tuple(
            SequenceView(
                request_id=one.request.request_id,
                index=0,
                slot=0,
                owner=one.request.owner,
                status="waiting",
                prompt_tokens=one.num_tokens,
                cached_tokens=0,
                output_tokens=0,
                blocks=0,
                age_seconds=now - one.arrival,
            )
            for one in self._waiting.values()
        )
