"""Combines the engine's deltas for all choices of an API request into pieces of text.

Knows no wire format.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from appliance.best_of import Likelihood, best
from appliance.dialects import Content, Part
from appliance.engine.messages import TokenLogprobs
from appliance.engine.request import FinishReason
from appliance.errors import ApplianceError, EngineDiedError, QueueTimeoutError
from appliance.output import ChoiceText
from appliance.server.merged import merged
from appliance.server.metrics import RequestTimer, Seconds
from appliance.server.responses import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from appliance.dialects import Reader
    from appliance.engine.messages import SequenceDelta
    from appliance.engine.process.generation import Generation
    from appliance.engine.request import Request
    from appliance.server.model_state import ModelState
    from appliance.tokenizer import Tokenizer

MAX_TURN = 64  # pieces per batch

logger = logging.getLogger(__name__)


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A final piece of one choice: text or parts, their tokens, the end."""

    choice: int
    text: str
    tokens: tuple[TokenLogprobs, ...]  # empty unless requested
    finish_reason: FinishReason | None
    parts: tuple[Part, ...] | None = None  # replaces the text if a reader splits it
    stopped_by: str = ""  # the stop string, at the end
    completion_tokens: int = 0  # of all choices, up to this piece

    @property
    def all_parts(self) -> tuple[Part, ...]:
        if self.parts is not None:
            return self.parts
        return (Content(self.text),) if self.text else ()


@dataclass(slots=True)
class FinishedChoice:
    text: str = ""  # complete at the end
    tokens: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    cumulative_logprob: float | UnsetType = UNSET  # with beam search and best_of
    parts: list[Part] = field(default_factory=list)  # in order, if a reader splits the text
    stopped_by: str = ""  # the stop string at its end
    # Parts with their tokens, in order, if log probabilities are reported.
    reported: list[tuple[Sequence[Part], Sequence[TokenLogprobs]]] = field(default_factory=list)

    @property
    def all_parts(self) -> list[Part]:
        return self.parts or ([Content(self.text)] if self.text else [])


@dataclass(frozen=True, slots=True)
class Reading:
    """Makes readers that split choices into thoughts, content and calls.

    Attributes:
        shown: control tokens that the reader needs to see.
    """

    make: Callable[[], Reader]
    shown: frozenset[int]


@dataclass(slots=True)
class _Choice:
    text: ChoiceText
    reader: Reader | None
    held: list[TokenLogprobs] = field(default_factory=list)  # of text that is not final
    likelihood: Likelihood = field(default_factory=Likelihood)
    ended: bool = False


class Answer:
    """The answers to one or several prompts; submits the requests on construction.

    Numbers choices prompt by prompt. Its pieces include candidates of best_of. Always close it:
    that aborts running requests.

    Args:
        reading: splits the text; None keeps it whole.
        request_id: id of the HTTP request, for the log.

    Raises:
        EngineUnavailableError: the engine is not ready.
        QuarantinedError: a request has killed engines.
        RateLimitError: the API key has used up its limit.
    """

    def __init__(
        self,
        state: ModelState,
        requests: Sequence[Request],
        reading: Reading | None = None,
        *,
        request_id: str = "",
    ) -> None:
        info, tokenizer = state.serving()
        sampling = requests[0].sampling
        self._state = state
        self._requests = requests
        self._reading = reading
        self._sampling = sampling
        self.num_choices = len(requests) * sampling.num_choices
        self.prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._metrics = state.metrics
        self._name = requests[0].request_id
        self._request_id = request_id
        self._owner = requests[0].owner
        self._use = state.use.begin(self._owner, self.prompt_tokens)
        self._timer = RequestTimer(state.metrics)
        self.scores_prompts = sampling.prompt_logprobs is not None
        self._ends = {*info.eos_token_ids, *sampling.stop_token_ids}
        for request in requests:
            state.metrics.prompt_tokens.observe(len(request.prompt_token_ids))
        self._generations: list[Generation] = []
        self._begin(tokenizer)

    def _begin(self, tokenizer: Tokenizer) -> None:
        sampling, reading = self._sampling, self._reading
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._cached_tokens = [0] * len(self._requests)
        self._drafts = [(0, 0)] * self.num_choices  # drafted and accepted tokens per choice
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in self._requests]
        shown = frozenset() if reading is None else reading.shown
        self._choices = [
            _Choice(
                ChoiceText(tokenizer, sampling.stop, shown),
                None if reading is None else reading.make(),
            )
            for _ in range(self.num_choices)
        ]
        self._generations.clear()
        try:
            for request in self._requests:
                self._generations.append(self._state.engine.generate(request))
        except ApplianceError:
            self.close()
            raise

    async def _begin_again(self) -> None:
        """Submit everything again after the engine died, unless a piece was sent."""
        for generation in self._generations:
            generation.close()
        await self._state.engine.ready()
        logger.warning("%s is begun again, since the engine died", self._name)
        self._begin(self._state.serving()[1])

    def usage(self) -> Usage:
        usage = self.usage_at(self.completion_tokens)
        proposed, accepted = map(sum, zip(*self._drafts, strict=True))
        if self._reading is not None or proposed:
            usage.completion_tokens_details = CompletionTokensDetails(
                UNSET if self._reading is None else self.reasoning_tokens,
                accepted if proposed else UNSET,
                proposed - accepted if proposed else UNSET,
            )
        return usage

    def usage_at(self, completion_tokens: int) -> Usage:
        """Return the token counts up to a piece with this many generated tokens; no details."""
        prompt = self.prompt_tokens
        return Usage(
            prompt,
            completion_tokens,
            prompt + completion_tokens,
            PromptTokensDetails(self.cached_tokens),
        )

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached_tokens)

    @property
    def seconds(self) -> Seconds:
        return self._timer.seconds

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Yield batches of the available pieces; each choice ends with a finish reason.

        If the engine dies before the first piece, submits everything again.

        Raises:
            RequestError: the engine refused the request.
            EngineError: the engine failed or died.
        """
        told = False
        try:
            async with aclosing(self._pieces()) as found:
                async for pieces in found:
                    told = True
                    yield pieces
            return
        except EngineDiedError:
            if told:
                raise
        await self._begin_again()
        async with aclosing(self._pieces()) as found:
            async for pieces in found:
                yield pieces

    async def _pieces(self) -> AsyncGenerator[list[Piece], None]:
        try:
            if len(self._generations) > 1:
                async with aclosing(merged(self._generations, MAX_TURN)) as deltas:
                    async for prompt, delta in deltas:
                        if pieces := self._take(prompt, delta):
                            yield pieces
                return
            (generation,) = self._generations
            async for delta in generation:
                pieces = self._take(0, delta)
                # Sends together what arrived while the client was not reading.
                while len(pieces) < MAX_TURN and (more := generation.ready()) is not None:
                    pieces += self._take(0, more)
                if pieces:
                    yield pieces
        except QueueTimeoutError:
            self._metrics.count_expired(self._owner, "waiting")
            raise

    async def whole(self) -> list[FinishedChoice]:
        """Return the requested choices once all have ended; raises like `pieces`.

        If the engine dies before that, submits everything again.
        """
        try:
            return await self._whole()
        except EngineDiedError:
            await self._begin_again()
            return await self._whole()

    async def _whole(self) -> list[FinishedChoice]:
        choices = [FinishedChoice() for _ in range(self.num_choices)]
        texts: list[list[str]] = [[] for _ in choices]
        async for pieces in self._pieces():
            for piece in pieces:
                choice = choices[piece.choice]
                texts[piece.choice].append(piece.text)
                choice.tokens += piece.tokens
                choice.parts += piece.parts or ()
                if self._sampling.logprobs is not None:
                    choice.reported.append((piece.all_parts, piece.tokens))
                if piece.finish_reason is not None:
                    choice.finish_reason = piece.finish_reason.value
                    choice.stopped_by = piece.stopped_by
        for choice, parts in zip(choices, texts, strict=True):
            choice.text = "".join(parts)
        sampling, likelihoods = self._sampling, [choice.likelihood for choice in self._choices]
        if not (sampling.use_beam_search or sampling.takes_best):
            return choices
        for choice, likelihood in zip(choices, likelihoods, strict=True):
            choice.cumulative_logprob = likelihood.cumulative_logprob
        if not sampling.takes_best:
            return choices
        per_prompt = sampling.num_choices
        return [
            choices[first + place]
            for first in range(0, self.num_choices, per_prompt)
            for place in best(likelihoods[first : first + per_prompt], sampling.n)
        ]

    def close(self) -> None:
        for generation in self._generations:
            generation.close()
        self._use.end()
        complete = all(choice.ended for choice in self._choices)
        self._timer.end(complete=complete)
        logger.info(
            "%s: %s, %d prompt tokens (%d cached), %d generated",
            self._name,
            describe_outcome(self._request_id, complete=complete),
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
        )

    def _take(self, prompt: int, delta: SequenceDelta) -> list[Piece]:
        """Return the pieces that a delta completes."""
        number = prompt * self._sampling.num_choices + delta.index
        choice = self._choices[number]
        if choice.ended:  # by a stop string, with more deltas queued
            return []
        if delta.num_cached_tokens > self._cached_tokens[prompt]:
            self._cached_tokens[prompt] = delta.num_cached_tokens
        self.prompt_logprobs[prompt] += delta.prompt_logprobs or ()
        _, accepted = self._drafts[number]
        self._drafts[number] = delta.num_draft_tokens, delta.num_accepted_tokens
        if delta.token_ids:
            self._timer.tokens(number, len(delta.token_ids), delta.queue_seconds)
        if delta.queue_seconds is not None:
            self._metrics.observe_wait(self._owner, delta.queue_seconds)
        if len(delta.token_ids) < 2 or not (self._sampling.stop or choice.reader):
            return self._push(prompt, number, delta)
        # Drop tokens of the same step after its end.
        pieces: list[Piece] = []
        for kept, one in enumerate(delta.one_by_one(), 1):
            pieces += self._push(prompt, number, one)
            if choice.ended:
                used = min(delta.num_accepted_tokens, accepted + kept)
                self._drafts[number] = delta.num_draft_tokens, used
                break
        return pieces

    def _push(self, prompt: int, number: int, delta: SequenceDelta) -> list[Piece]:
        choice = self._choices[number]
        self.completion_tokens += len(delta.token_ids)
        self._use.take(len(delta.token_ids))
        text, reason = choice.text.push(delta.token_ids, delta.finish_reason)
        parts: tuple[Part, ...] | None = None
        if choice.reader is not None:
            parts, reason = self._read(choice.reader, text, len(delta.token_ids), reason)
            text = ""
        choice.likelihood.add(delta)
        if delta.logprobs is not None:
            choice.held += self._shown(delta, delta.logprobs)
        if reason is not None:
            choice.ended = True
            self._metrics.count_choice(reason.value)
            if reason is FinishReason.TIMEOUT:
                self._metrics.count_expired(self._owner, "running")
            if delta.finish_reason is None:
                self._generations[prompt].close_choice(delta.index)
        elif not (parts or text):
            return []
        tokens: tuple[TokenLogprobs, ...] = ()
        if choice.held:
            tokens, choice.held = tuple(choice.held), []
        stopped_by = "" if reason is None else choice.text.stopped_by
        return [Piece(number, text, tokens, reason, parts, stopped_by, self.completion_tokens)]

    def _read(
        self, reader: Reader, text: str, num_tokens: int, reason: FinishReason | None
    ) -> tuple[tuple[Part, ...], FinishReason | None]:
        """Return a text's parts and the finish reason: STOP if nothing may follow."""
        thought = reader.thinking
        parts = reader.push(text)
        if thought or reader.thinking:
            self.reasoning_tokens += num_tokens
        if reason is not None:
            parts += reader.finish(cut=reason is not FinishReason.STOP)
        return tuple(parts), FinishReason.STOP if reader.ended else reason

    def _shown(
        self, delta: SequenceDelta, logprobs: tuple[TokenLogprobs, ...]
    ) -> tuple[TokenLogprobs, ...]:
        """Return a delta's log probabilities, without an end token's."""
        if (
            delta.finish_reason is FinishReason.STOP
            and delta.token_ids
            and delta.token_ids[-1] in self._ends
        ):
            return logprobs[:-1]
        return logprobs


def describe_outcome(request_id: str, *, complete: bool) -> str:
    """Describe the end for the log; after a failure, with the request id."""
    return "complete" if complete else f"ended early (x-request-id {request_id or '-'})"
