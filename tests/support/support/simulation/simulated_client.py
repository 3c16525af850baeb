"""A client of the simulated engine: its requests, and the answers so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.text import Likelihood

if TYPE_CHECKING:
    from support.engine.plain_search import Found

    from appliance.engine.nouns.request import FinishReason, Request


@dataclass(slots=True)
class Search:
    """A beam search, as its client sees it."""

    right: list[Found]
    found: dict[int, Found] = field(default_factory=dict)  # so far

    def is_part_of(self, answers: list[Found]) -> bool:
        """Whether the answers so far may be part of these."""
        return all(answers[index] == found for index, found in self.found.items())


@dataclass(slots=True)
class Choice:
    """One choice of a request that was accepted, as its client sees it."""

    request: Request
    index: int
    last: int  # content of the slot before the next token
    arrival: float
    num_tokens: int = 0  # tokens of the answer
    reason: FinishReason | None = None
    search: Search | None = None
    likelihood: Likelihood = field(default_factory=Likelihood)


def first_limit(request: Request) -> float:
    """Seconds before which a request's time cannot be over."""
    limits = (request.timeout, request.max_queue_seconds)
    return min(limit for limit in limits if limit is not None)
