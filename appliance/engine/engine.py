"""The engine: accepts requests, plans and runs steps, and returns each step's deltas.

On an asynchronous device it plans and enqueues the next step before it reads the last one's tokens.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from appliance.engine.grammars.grammars import Grammars, refusal
from appliance.engine.grammars.matchers import NO_WAY_ON
from appliance.engine.nouns.beacon import Beacon
from appliance.engine.nouns.limits import check_request, check_tokens
from appliance.engine.nouns.messages import SequenceDelta, StepReport
from appliance.engine.nouns.picture import TEXTS_ONLY
from appliance.engine.nouns.request import FinishReason
from appliance.engine.run.adapters.pool import AdapterPool
from appliance.engine.scheduling.deadlines import was_started, why_refused
from appliance.engine.scheduling.sequence_views import view_sequences, view_table
from appliance.errors import RequestError
from appliance.stats import MAX_STEPS_KEPT, EngineStats, StepView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.nouns.messages import EngineInfo, Table, Vocabulary
    from appliance.engine.nouns.plan import Plan, Sampled, Update
    from appliance.engine.nouns.request import AdapterRef, Request
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.adapters.loader import AdapterLoader
    from appliance.engine.run.picture_queue import PictureQueue
    from appliance.engine.run.runner import Runner
    from appliance.engine.scheduling.scheduler import Scheduler
    from appliance.engine.tiers.tiers import Tiers
    from appliance.stats import SequenceView

logger = logging.getLogger(__name__)


class LLMEngine:
    """A loaded model with its cache and its queue, driven by one thread.

    Its parts are public for who looks at one or puts another in its place, between two steps.

    Args:
        matchers: the grammars' states, shared with the runner.
        adapters: reads adapters; None if requests cannot use one.
        clock: seconds; requests time out by it.
        pictures: encodes pictures; None if requests can have none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tiers: Tiers,
        runner: Runner,
        info: EngineInfo,
        matchers: Matchers | None = None,
        adapters: AdapterLoader | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        beacon: Beacon | None = None,
        pictures: PictureQueue | None = None,
    ) -> None:
        self.info = info
        self.clock = clock
        self._beacon = beacon or Beacon()
        self.scheduler = scheduler
        self.tiers = tiers
        self.runner = runner
        self.grammars = Grammars(scheduler, matchers, info)
        self.pictures = pictures
        self.adapters = None
        if adapters is not None:
            self.adapters = AdapterPool(adapters, self._live, lambda: self.clock())
        # Each with its launch time, and True if it was planned while another one ran.
        self._in_flight: deque[tuple[Plan, float, bool]] = deque()
        self._expired: list[SequenceDelta] = []  # for the next report
        self._last_end = 0.0
        self._step_seconds = 0.0
        self._num_steps = 0
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS_KEPT)
        self._nan_logits = 0
        self._random = random.SystemRandom()

    @property
    def has_work(self) -> bool:
        serving = self.scheduler.has_work or bool(
            self._in_flight or self._expired or self.grammars.waiting
        )
        serving = serving or (self.adapters is not None and self.adapters.is_busy)
        serving = serving or (self.pictures is not None and self.pictures.waiting > 0)
        spare = self.tiers.has_writes or self.grammars.prepares
        return serving or spare

    def check_invariants(self) -> None:
        """Assert what is true between two steps of blocks, states and sequences."""
        self.scheduler.check_invariants()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Set the model's tokens; call it before the first request with a grammar."""
        self.grammars.set_vocabulary(vocabulary)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run: too long, or a token id outside the vocabulary.
        """
        check_tokens(request, self.info)
        if request.pictures is not None:
            self._check_pictures(request)
        if request.sampling.seed is None:
            seed = self._random.getrandbits(63)
            sampling = msgspec.structs.replace(request.sampling, seed=seed)
            request = msgspec.structs.replace(request, sampling=sampling)
        if request.adapter is not None:
            if self.adapters is None:
                raise RequestError("this engine has no room for adapters", param="model")
            ready = self.adapters.take(request)
            if ready is None:
                return
            request = ready
        self._admit(request, self.clock())

    def _check_pictures(self, request: Request) -> None:
        if self.pictures is None:
            raise RequestError(TEXTS_ONLY, param="messages", code="unsupported_content")
        if request.sampling.prompt_logprobs is not None and not request.to_read:
            raise RequestError(
                "no token follows the last picture that could be scored; leave out prompt_logprobs,"
                " or write a text behind it",
                param="prompt_logprobs",
            )

    def _admit(self, request: Request, now: float) -> None:
        arrival = self.scheduler.stamp(now)
        is_held = request.pictures is not None and self._pictures_of(request, arrival)
        if not (is_held or self.grammars.hold(request, arrival)):
            self.scheduler.add(request, now, arrival=arrival)

    def _pictures_of(self, request: Request, arrival: float) -> bool:
        """Begin to encode a request's pictures; return False if all of them are encoded."""
        check_request(request, self.scheduler.state.bounds)  # before the work
        assert self.pictures is not None
        return self.pictures.hold(request, arrival, self.scheduler.num_cached)

    def _start_pictured(self, now: float) -> None:
        """Queue the requests whose pictures are encoded."""
        if self.pictures is None or not self.pictures.waiting:
            return
        self._expired += self.pictures.late(now)
        for held in self.pictures.take():
            error = held.error
            try:
                if error is None and not self.grammars.hold(held.request, held.arrival):
                    self.scheduler.add(held.request, now, arrival=held.arrival)
            except RequestError as failure:
                error = str(failure)
            if error is not None:
                self._expired.append(refusal(held.request, error))
        if self.pictures.encoded.is_over:
            self.pictures.encoded.trim(self._live())

    def install_adapter(self, ref: AdapterRef) -> None:
        """Load an adapter at once, before the first step.

        Raises:
            ModelError: it cannot be used with this model.
        """
        assert self.adapters is not None
        self.adapters.install(ref)

    def load_adapter(self, ref: AdapterRef) -> None:
        """Read an adapter before its first request; a report has the answer."""
        if self.adapters is not None:
            self.adapters.wish(ref)

    def unload_adapter(self, ref: AdapterRef) -> None:
        """Forget an adapter once no request uses it."""
        if self.adapters is not None:
            self.adapters.unload(ref)

    def _live(self) -> set[str]:
        live = {sequence.request.request_id for sequence in self.scheduler.sequences()}
        pictured = set() if self.pictures is None else self.pictures.held()
        return live | self.grammars.held() | pictured

    def _start_adapted(self, now: float) -> None:
        """Queue the requests whose adapter has been read."""
        if self.adapters is None or not self.adapters.is_busy:
            return
        ready, ends = self.adapters.start(now)
        self._expired += ends
        for request in ready:
            try:
                self._admit(request, now)
            except RequestError as error:
                self._expired.append(refusal(request, str(error)))

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one choice of it, in any phase; return False if it was not live.

        A request of which nothing was queued yet ends as a whole.
        """
        if self.adapters is not None and self.adapters.abandon(request_id):
            return True
        if self.pictures is not None and self.pictures.abandon(request_id):
            return True
        return self.grammars.abandon(request_id) or self.scheduler.abort(request_id, index)

    def step(self) -> StepReport:
        """Start one step and finish the oldest one; deltas are in plan order.

        An interrupt, such as Ctrl-C, discards steps in flight; the next steps repeat them.
        """
        begin = now = self.clock()
        self._expired += _overdue(self.scheduler.expire(now), now)
        self._start_adapted(now)
        self._start_pictured(now)
        self._expired += self.grammars.start(now)
        launched = self.scheduler.plan(now)
        started = () if launched is None else launched.started
        if launched is None and not self._in_flight:
            waits = self.adapters is not None and self.adapters.idle()
            waits = waits or (self.pictures is not None and self.pictures.idle())
            if not (waits or self._expired or self.grammars.idle()):
                self.tiers.idle()
            return self._report()
        try:
            if launched is not None:
                if started:
                    self._beacon.start(started)
                self.tiers.hold(self.runner.launch(launched))
                self._in_flight.append((launched, begin, bool(self._in_flight)))
                if len(self._in_flight) <= self.runner.depth:
                    return self._report(started=started)
            sampled = self._collect()
        except MemoryError as error:
            self.discard_plans()
            return self._without_memory(launched, error)
        except BaseException:
            self.discard_plans()
            raise
        plan, begun, is_ahead = self._in_flight.popleft()
        load = plan.load
        deltas = self._commit(plan, sampled)
        end = self.clock()
        self._step_seconds = end - begin
        self.scheduler.observe(load, end - max(begun, self._last_end), is_ahead=is_ahead)
        self._last_end = end
        self._num_steps += 1
        self._beacon.advance()
        self._steps.append(_view(self._num_steps, plan, self._step_seconds))
        if plan.num_prompt_rows:
            self.tiers.rates.saw_step(plan.num_tokens, self.runner.seconds)
        self.tiers.after_step()
        return self._report(deltas, started)

    def _collect(self) -> list[Sampled]:
        if not self.runner.depth:
            return self.runner.collect()
        with self._beacon.waiting_for_device():
            return self.runner.collect()

    def _report(
        self, deltas: tuple[SequenceDelta, ...] = (), started: tuple[str, ...] = ()
    ) -> StepReport:
        expired, self._expired = self._expired, []
        answers = () if self.adapters is None else self.adapters.take_answers()
        return StepReport(deltas=(*expired, *deltas), started=started, adapters=answers)

    def _commit(self, plan: Plan, sampled: list[Sampled]) -> tuple[SequenceDelta, ...]:
        self._nan_logits += sum([result.broken for result in sampled])
        return _deltas_of(self.grammars.advance(self.scheduler.commit(plan, sampled)))

    def close(self) -> None:
        """Write pending blocks to disk, as far as time allows."""
        if self.adapters is not None:
            self.adapters.close()
        if self.pictures is not None:
            self.pictures.close()
        self.tiers.close()

    def discard_plans(self) -> None:
        self._in_flight.clear()
        self.runner.discard()
        self.scheduler.discard_plans()

    def stats(self) -> EngineStats:
        stats = self.grammars.add_stats(self.scheduler.stats())
        waiting = 0 if self.adapters is None else self.adapters.waiting
        if self.pictures is not None:
            waiting += self.pictures.waiting
            stats = self.pictures.add_stats(stats)
        return msgspec.structs.replace(
            stats,
            waiting=stats.waiting + waiting,
            step_seconds=self._step_seconds,
            model_seconds=self.runner.seconds,
            nan_logits_total=self._nan_logits,
        )

    def sequences(self) -> tuple[SequenceView, ...]:
        now = self.clock()
        held = () if self.pictures is None else self.pictures.views(now)
        return view_sequences(self.scheduler, self.tiers, now) + held

    def take_steps(self) -> tuple[StepView, ...]:
        """Return the steps since the last call, at most the last `MAX_STEPS_KEPT`."""
        steps = tuple(self._steps)
        self._steps.clear()
        return steps

    def block_table(self, request_id: str, index: int) -> Table:
        return view_table(self.scheduler, request_id, index, self.info.block_size)

    def _without_memory(self, plan: Plan | None, error: MemoryError) -> StepReport:
        """End the sequences that made a step too large: those in prefill, if any."""
        assert plan is not None, "steps run out of memory when they are launched"
        large = [entry.sequence for entry in plan.scheduled if entry.num_own > 1]
        failed = large or [entry.sequence for entry in plan.scheduled]
        logger.error("a step of %d rows failed: %s", plan.num_tokens, error)
        updates = [
            update for sequence in failed for update in self.scheduler.fail(sequence, str(error))
        ]
        return self._report(_deltas_of(updates), plan.started)


def _view(number: int, plan: Plan, seconds: float) -> StepView:
    """Describe a step; cheap, because it runs in every step."""
    rows = plan.num_prompt_rows
    return StepView(number, rows, plan.num_tokens - rows, len(plan.scheduled), seconds)


def _deltas_of(updates: Iterable[Update]) -> tuple[SequenceDelta, ...]:
    """Return a delta for each update of a sequence that the client knows."""
    return tuple([_delta(update) for update in updates if _is_choice(update.sequence)])


def _overdue(updates: Iterable[Update], now: float) -> list[SequenceDelta]:
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
