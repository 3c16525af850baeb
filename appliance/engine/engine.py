"""The engine: submit requests, step, collect what each step added. Decide, run, commit."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.engine.loading import load_parts
from appliance.engine.messages import EngineInfo, SequenceDelta, StepReport
from appliance.engine.request import FinishReason
from appliance.errors import RequestError
from appliance.stats import EngineStats, SequenceView

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.engine.model_runner import ModelRunner
    from appliance.engine.plan import Plan, Update
    from appliance.engine.request import Request
    from appliance.engine.sampler import Sampled
    from appliance.engine.scheduler import Scheduler
    from appliance.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class LLMEngine:
    """A loaded model with its cache and its queue; one thread drives it.

    Args:
        scheduler: decides.
        runner: runs.
        info: what was loaded.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner[Any], info: EngineInfo) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._step_seconds = 0.0
        self._random = random.SystemRandom()

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        eos_token_ids: tuple[int, ...],
        metadata: memoryview | None,
        on_progress: Callable[[str, int, int], None],
    ) -> LLMEngine:
        """Plan memory, then load the model.

        Args:
            config: what to load and how much to run at once; `model` is a path.
            eos_token_ids: tokens that end an answer.
            metadata: where block metadata goes; None keeps it private.
            on_progress: called with stage, done, total.

        Raises:
            ModelError: the model cannot be read or is not supported.
            MemoryPlanError: it does not fit.
        """
        return cls(*load_parts(config, eos_token_ids, metadata, on_progress))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served: too long, or a token id outside the vocabulary.
        """
        largest = max(request.prompt_token_ids, default=0)
        smallest = min(request.prompt_token_ids, default=0)
        for token_id in (smallest, largest, *request.sampling.logit_bias):
            if not 0 <= token_id < self.info.vocab_size:
                raise RequestError(
                    f"token id {token_id} is outside the vocabulary of {self.info.vocab_size}",
                    param="logit_bias" if token_id in request.sampling.logit_bias else "prompt",
                )
        if request.sampling.seed is None:
            seed = self._random.getrandbits(63)
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            request = msgspec.structs.replace(request, sampling=sampling)
        self._scheduler.add(request, time.monotonic())

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one choice of it, in whatever phase; False if it was not live."""
        return self._scheduler.abort(request_id, index)

    def step(self) -> StepReport:
        """Run one step; its deltas are in the order of the plan.

        If it is interrupted, as by Ctrl-C, nothing of it is remembered and the next one repeats it.
        """
        begin = time.perf_counter()
        plan = self._scheduler.plan(time.monotonic())
        if plan is None:
            return StepReport()
        try:
            sampled = self._runner.run(plan)
        except MemoryError as error:
            self._scheduler.discard_plans()
            return self._without_memory(plan, error)
        except BaseException:
            self._scheduler.discard_plans()
            raise
        sampling = [entry.sequence for entry in plan.scheduled if entry.samples]
        results = dict(zip(sampling, sampled, strict=True))
        failed = [
            self._fail(sequence, result.error)
            for sequence, result in results.items()
            if result.error is not None
        ]
        updates = self._scheduler.commit(plan, [result.token_id for result in sampled])
        deltas = [self._delta(update, results[update.sequence]) for update in updates]
        self._step_seconds = time.perf_counter() - begin
        return StepReport(deltas=(*deltas, *failed), started=plan.started)

    def stats(self) -> EngineStats:
        """A snapshot of the numbers."""
        return msgspec.structs.replace(
            self._scheduler.stats(),
            step_seconds=self._step_seconds,
            model_seconds=self._runner.seconds,
        )

    def sequences(self) -> tuple[SequenceView, ...]:
        """All live sequences, as the dashboard shows them."""
        now = time.monotonic()
        return tuple(
            SequenceView(
                request_id=sequence.request.request_id,
                index=sequence.index,
                slot=sequence.slot,
                owner=sequence.request.owner,
                status=sequence.status.value,
                prompt_tokens=sequence.num_prompt_tokens,
                cached_tokens=sequence.num_cached,
                output_tokens=sequence.num_output_tokens,
                blocks=len(sequence.block_table),
                age_seconds=now - sequence.arrival,
            )
            for sequence in self._scheduler.sequences()
        )

    def _without_memory(self, plan: Plan, error: MemoryError) -> StepReport:
        """End the sequences that made a step too large: those in prefill, if there are any."""
        large = [entry.sequence for entry in plan.scheduled if entry.num_tokens > 1]
        failed = large or [entry.sequence for entry in plan.scheduled]
        logger.error("a step of %d rows failed: %s", plan.num_tokens, error)
        return StepReport(
            deltas=tuple(self._fail(sequence, str(error)) for sequence in failed),
            started=plan.started,
        )

    def _fail(self, sequence: Sequence, message: str | None) -> SequenceDelta:
        self._scheduler.finish(sequence, FinishReason.ERROR)
        return SequenceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            finish_reason=FinishReason.ERROR,
            error=message,
        )

    @staticmethod
    def _delta(update: Update, sampled: Sampled) -> SequenceDelta:
        sequence = update.sequence
        first = sequence.num_output_tokens == 1
        waited = sequence.first_scheduled - sequence.arrival if sequence.first_scheduled else 0.0
        return SequenceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=(update.token_id,),
            logprobs=None if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=update.finish_reason,
            num_cached_tokens=sequence.num_cached,
            queue_seconds=waited if first else None,
        )
