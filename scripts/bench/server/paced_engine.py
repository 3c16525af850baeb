"""An engine that computes nothing and gives each sequence a token of its prompt a step.

It takes the place of the engine's process, so that the API process can be measured by itself. The
first argument is the pace in steps per second.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.messages import (
    Candidate,
    EngineInfo,
    SequenceDelta,
    StepReport,
    Table,
    TokenLogprobs,
    Vocabulary,
)
from appliance.engine.process.entry import run_engine_process
from appliance.engine.request import FinishReason, Request
from appliance.stats import EngineStats, SequenceView, StepView

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.beacon import Beacon
    from appliance.engine.process.worker import LoadEngine

CONTEXT, VOCABULARY, BLOCKS, BLOCK_SIZE = 32_768, 2**20, 4096, 16


@dataclass
class Running:
    """One choice and its number of tokens."""

    request: Request
    index: int
    output: int = 0


class PacedEngine:
    """The engine of `appliance.engine.process.worker.Engine`, at a fixed pace."""

    def __init__(self, step_seconds: float, eos_token_ids: tuple[int, ...]) -> None:
        self.info = EngineInfo(
            model="paced", architecture="none", device="none", backend="none", weight_format="none",
            kv_format="none", context_length=CONTEXT, vocab_size=VOCABULARY,
            eos_token_ids=eos_token_ids, block_size=BLOCK_SIZE, num_blocks=BLOCKS,
            max_num_seqs=256, weight_bytes=0, kv_bytes=0, workspace_bytes=0, memory_bytes=0,
            load_seconds=0.0, fingerprint="paced",
        )  # fmt: skip
        self._step_seconds = step_seconds
        self._next = 0.0
        self._new: list[str] = []
        self._running: list[Running] = []
        self._steps = self._generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> None:
        self._new.append(request.request_id)
        self._running += [Running(request, index) for index in range(request.sampling.num_choices)]

    def abort(self, request_id: str, index: int | None = None) -> bool:
        before = len(self._running)
        self._running = [
            one
            for one in self._running
            if one.request.request_id != request_id or index not in (None, one.index)
        ]
        return len(self._running) < before

    def step(self) -> StepReport:
        """Wait until it is time, then add a token to each sequence."""
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._step_seconds
        self._steps += 1
        self._generated += len(self._running)
        deltas = tuple(map(self._advance, self._running))
        self._running = [
            one
            for one, delta in zip(self._running, deltas, strict=True)
            if delta.finish_reason is None
        ]
        started, self._new = tuple(self._new), []
        return StepReport(deltas=deltas, started=started)

    def stats(self) -> EngineStats:
        return EngineStats(
            steps_total=self._steps,
            running=len(self._running),
            generation_tokens_total=self._generated,
            blocks_total=BLOCKS,
            blocks_free=BLOCKS,
            block_size=BLOCK_SIZE,
        )

    def sequences(self) -> tuple[SequenceView, ...]:
        return tuple(
            SequenceView(
                request_id=one.request.request_id,
                index=one.index,
                slot=slot,
                owner="",
                status="running",
                prompt_tokens=len(one.request.prompt_token_ids),
                cached_tokens=0,
                output_tokens=one.output,
                blocks=0,
                age_seconds=0.0,
            )
            for slot, one in enumerate(self._running, 1)
        )

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Ignore it: no grammar is followed."""

    def take_steps(self) -> tuple[StepView, ...]:
        return ()

    def block_table(self, request_id: str, index: int) -> Table:
        return Table(request_id=request_id, index=index, blocks=(), hashes=b"")

    def close(self) -> None:
        """Keep nothing."""

    @staticmethod
    def _advance(one: Running) -> SequenceDelta:
        sampling, prompt = one.request.sampling, one.request.prompt_token_ids
        token_id = prompt[one.output % len(prompt)]
        one.output += 1
        chosen = TokenLogprobs(Candidate(token_id, -0.5), ())
        return SequenceDelta(
            request_id=one.request.request_id,
            index=one.index,
            token_ids=(token_id,),
            logprobs=None if sampling.logprobs is None else (chosen,),
            finish_reason=FinishReason.LENGTH if one.output == sampling.max_tokens else None,
            queue_seconds=0.0 if one.output == 1 else None,
        )


def loader_of(steps_per_second: float) -> LoadEngine:
    """Return a loader of an engine with that pace."""

    def load(
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...],
        metadata: memoryview | None,
        on_progress: Callable[[str, int, int], None],
        beacon: Beacon,
    ) -> PacedEngine:
        return PacedEngine(1 / steps_per_second, eos_token_ids)

    return load


if __name__ == "__main__":
    sys.exit(run_engine_process(sys.argv[2:], lambda: loader_of(float(sys.argv[1]))))
