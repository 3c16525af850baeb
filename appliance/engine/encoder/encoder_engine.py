"""An encoder's engine: reads whole texts, as many as fit into a step.

Has no KV cache, so no blocks, prefixes or preemption.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from appliance.engine.nouns.limits import check_tokens
from appliance.engine.nouns.messages import SequenceDelta, StepReport, Table
from appliance.engine.nouns.request import FinishReason, Pooling
from appliance.engine.scheduling.deadlines import why_refused
from appliance.errors import RequestError
from appliance.model.encoder.texts import Texts
from appliance.stats import MAX_STEPS_KEPT, EngineStats, SequenceView, StepView

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from appliance.engine.encoder.encoder_execution import LoadedEncoder
    from appliance.engine.nouns.beacon import Beacon
    from appliance.engine.nouns.messages import EngineInfo, Vocabulary
    from appliance.engine.nouns.request import AdapterRef, Request


class EncoderEngine:
    """A loaded encoder and its queue, driven by one thread.

    Args:
        max_tokens: per step; a longer text runs alone.
    """

    def __init__(
        self,
        encoder: LoadedEncoder,
        info: EngineInfo,
        max_tokens: int,
        beacon: Beacon,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._beacon = beacon
        self.clock = clock
        self._waiting = TextQueue()
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS_KEPT)
        self._step_tokens, self._step_seconds = 0, 0.0
        self._num_steps = self._prompt_tokens = self._aborted = self._expired = self._broken = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: an encoder cannot serve it.
        """
        check_tokens(request, self.info)
        if request.pooling is None:
            raise RequestError(
                f"{self.info.model} is an encoder: it embeds and ranks texts and generates none; "
                "use /v1/embeddings or /v1/rerank",
                param="model",
            )
        if request.adapter is not None:
            raise RequestError("an encoder has no adapters", param="model")
        if request.second_text and self._encoder.ranking is None:
            raise RequestError("this encoder has no head that judges pairs of texts", param="model")
        if (length := len(request.prompt_token_ids)) > self.info.context_length:
            raise RequestError(
                f"the text has {length} tokens; this model reads {self.info.context_length}",
                param="input",
            )
        self._waiting.add(request, self.clock())

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Forget a waiting request; return False if there is none."""
        found = self._waiting.forget(request_id)
        self._aborted += found
        return found

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Ignore the tokens: an encoder has no grammars."""

    def load_adapter(self, ref: AdapterRef) -> None:
        """Ignore the adapter: `submit` refuses requests that name one."""

    def unload_adapter(self, ref: AdapterRef) -> None:
        """Ignore the adapter, as `load_adapter` does."""

    def close(self) -> None:
        """Do nothing: no state outlives the process."""

    def stats(self) -> EngineStats:
        return EngineStats(
            steps_total=self._num_steps,
            waiting=len(self._waiting),
            prompt_tokens_total=self._prompt_tokens,
            aborted_total=self._aborted,
            expired_total=self._expired,
            nan_logits_total=self._broken,
            step_prefill_tokens=self._step_tokens,
            step_seconds=self._step_seconds,
            model_seconds=self._step_seconds,
        )

    def sequences(self) -> tuple[SequenceView, ...]:
        return self._waiting.views(self.clock())

    def take_steps(self) -> tuple[StepView, ...]:
        """Return the steps since the last call, at most the last `MAX_STEPS_KEPT`."""
        steps = tuple(self._steps)
        self._steps.clear()
        return steps

    def block_table(self, request_id: str, index: int) -> Table:
        """Return an empty table: there are no blocks."""
        return Table(request_id=request_id, index=index)

    def step(self) -> StepReport:
        now = self.clock()
        late = self._waiting.expire(now)
        self._expired += len(late)
        chosen = self._waiting.take(self.info.max_num_seqs, self._max_tokens)
        if not chosen:
            return StepReport(deltas=late)
        started = tuple(one.request.request_id for one in chosen)
        self._beacon.start(started)
        deltas = self._run(chosen, now)
        num_tokens = sum(one.num_tokens for one in chosen)
        self._num_steps += 1
        self._prompt_tokens += num_tokens
        self._beacon.advance()
        self._step_tokens, self._step_seconds = num_tokens, self.clock() - now
        self._steps.append(
            StepView(self._num_steps, num_tokens, 0, len(chosen), self._step_seconds)
        )
        return StepReport(deltas=(*late, *deltas), started=started)

    def _run(self, chosen: list[WaitingText], now: float) -> list[SequenceDelta]:
        texts = Texts.of(
            [(one.request.prompt_token_ids, self._types(one.request)) for one in chosen]
        )
        hidden = np.split(self._encoder.hidden(texts), texts.starts[1:-1])
        values = np.stack(
            [self._pooled(one.request, own) for one, own in zip(chosen, hidden, strict=True)]
        )
        judged = [place for place, one in enumerate(chosen) if one.request.second_text]
        logits: dict[int, NDArray[np.float32]] = {}
        if judged:
            ranked = self._encoder.rank(values[judged])
            logits = {place: logit[None] for place, logit in zip(judged, ranked, strict=True)}
        return [
            self._delta(one, logits.get(place, row), now)
            for place, (one, row) in enumerate(zip(chosen, values, strict=True))
        ]

    def _types(self, request: Request) -> list[int]:
        """Return 1 for tokens of a pair's second text, if the model has token types."""
        length = len(request.prompt_token_ids)
        second = request.second_text if self._encoder.num_token_types > 1 else 0
        return [0] * (second or length) + [1] * (length - (second or length))

    def _pooled(self, request: Request, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Pool the states of a text's tokens to (hidden_size,)."""
        ranking, pooling = self._encoder.ranking, request.pooling
        if request.second_text and ranking is not None:
            return ranking.judged(hidden, request.prompt_token_ids)
        if pooling is Pooling.MEAN:
            mean: NDArray[np.float32] = hidden.mean(0)
            return mean
        chosen: NDArray[np.float32] = hidden[-1 if pooling is Pooling.LAST else 0]
        return chosen

    def _delta(self, one: WaitingText, values: NDArray[np.float32], now: float) -> SequenceDelta:
        if not np.isfinite(values).all():
            self._broken += 1
            return SequenceDelta(
                request_id=one.request.request_id,
                finish_reason=FinishReason.ERROR,
                error="the model's hidden states are not finite for this text",
            )
        return SequenceDelta(
            request_id=one.request.request_id,
            finish_reason=FinishReason.LENGTH,
            queue_seconds=now - one.arrival,
            pooled=values.astype(np.float32).tobytes(),
        )


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


@dataclass(frozen=True, slots=True)
class WaitingText:
    request: Request
    arrival: float  # monotonic seconds

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)
