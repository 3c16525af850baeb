"""The scheduler's counters and their snapshot. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.engine.nouns.plan import Plan
from appliance.engine.scheduling.policy import MAX_DRAFTS
from appliance.stats import EngineStats

if TYPE_CHECKING:
    from appliance.engine.blocks.block_manager import BlockManager
    from appliance.engine.nouns.plan import ScheduledSequence


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
