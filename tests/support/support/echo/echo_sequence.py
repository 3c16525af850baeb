"""One choice of a request to the echo: its progress, and the delta of each step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from support.echo.echo_reports import reported

from appliance.engine.nouns.messages import SequenceDelta, Table
from appliance.stats import SequenceView

if TYPE_CHECKING:
    from appliance.engine.nouns.request import FinishReason, Request


@dataclass
class EchoSequence:
    request: Request
    index: int
    slot: int
    says: tuple[int, ...]
    computed: int = 0
    output: int = 0
    drafts: int = 0
    accepted: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    arrival: float = field(default_factory=time.monotonic)

    def delta(
        self, run: tuple[int, ...], reason: FinishReason | None, error: str | None = None
    ) -> SequenceDelta:
        """The tokens and the report that a step has added."""
        logprobs = None
        count = self.request.sampling.logprobs
        if run and count is not None:  # later choices are likelier
            logprobs = tuple(reported(token, -0.5 / (1 + self.index), count) for token in run)
        scores = None
        count = self.request.sampling.prompt_logprobs
        first = self.output <= len(run) and not self.index
        if count is not None and error is None and first:
            ids = self.request.prompt_token_ids[1:]
            scores = tuple(reported(token, -0.5, count) for token in ids)
        return SequenceDelta(
            prompt_logprobs=scores,
            request_id=self.request.request_id,
            index=self.index,
            token_ids=run,
            logprobs=logprobs,
            finish_reason=reason,
            error=error,
            num_cached_tokens=self.cached,
            num_draft_tokens=self.drafts,
            num_accepted_tokens=self.accepted,
            queue_seconds=0.001 if run and self.output == len(run) else None,
        )

    def table(self, block_size: int) -> Table:
        full = self.computed // block_size
        return Table(
            request_id=self.request.request_id,
            index=self.index,
            num_tokens=self.computed,
            blocks=tuple(self.blocks),
            hashes=b"".join(bytes([block]) * 16 for block in self.blocks[:full]),
        )

    def view(self) -> SequenceView:
        return SequenceView(
            request_id=self.request.request_id,
            index=self.index,
            slot=self.slot,
            owner=self.request.owner,
            status="running" if self.slot else "waiting",
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached,
            output_tokens=self.output,
            blocks=len(self.blocks),
            age_seconds=0.0,
        )
