"""Sends an API request's prompts to the engine and returns the pieces of all choices.

Knows no wire format.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING

from msgspec import UNSET

from appliance.engine.nouns.request import FinishReason
from appliance.errors import EngineDiedError, QueueTimeoutError
from appliance.server.metrics.metrics import RequestTimer, Seconds
from appliance.server.requests.exchange import CompletionTokensDetails, PromptTokensDetails, Usage
from appliance.server.requests.pieces import AnswerChoice, FinishedChoice, Piece
from appliance.text import ChoiceText, best

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from typing import Self

    from appliance.engine.nouns.messages import SequenceDelta, TokenLogprobs
    from appliance.engine.nouns.request import Request
    from appliance.engine.process.generation import Generation
    from appliance.server.models.model_state import ModelState
    from appliance.server.requests.pieces import Reading
    from appliance.tokenizer import Tokenizer

MAX_TURN = 64  # pieces per batch

logger = logging.getLogger(__name__)


class Answer:
    """The answers to one or several prompts, read inside `with`.

    It holds nothing before and after: entering submits the requests, leaving aborts those that
    still run. So no failure on the way to the client leaves one open.
    Numbers choices prompt by prompt. Its pieces include candidates of best_of.

    Args:
        reading: splits the text; None keeps it whole.
        request_id: id of the HTTP request, for the log.
    """

    def __init__(
        self,
        state: ModelState,
        requests: Sequence[Request],
        reading: Reading | None = None,
        *,
        request_id: str = "",
    ) -> None:
        info, _ = state.serving()
        sampling = requests[0].sampling
        self._state = state
        self._requests = requests
        self._reading = reading
        self._sampling = sampling
        self.num_choices = len(requests) * sampling.num_choices
        self.prompt_lengths = [len(request.prompt_token_ids) for request in requests]
        self.prompt_tokens = sum(self.prompt_lengths)
        self._metrics = state.metrics
        self._name = requests[0].request_id
        self._request_id = request_id
        self._owner = requests[0].owner
        self.scores_prompts = sampling.prompt_logprobs is not None
        self._ends = {*info.eos_token_ids, *sampling.stop_token_ids}
        self.completion_tokens = 0
        self._cached_tokens = [0] * len(requests)
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in requests]
        self._choices: list[AnswerChoice] = []
        self._generations: list[Generation] = []
        self._running = ExitStack()  # closes the generations

    def __enter__(self) -> Self:
        """Submit the requests.

        Raises:
            EngineUnavailableError: the engine is not ready.
            QuarantinedError: a request has killed engines.
            QueueFullError: too many requests wait.
            RateLimitError: the API key has used up its limit.
        """
        state = self._state
        _, tokenizer = state.serving()
        state.queue.check(self._owner, len(self._requests), self.prompt_tokens)
        with ExitStack() as undo:
            self._use = state.use.begin(self._owner, self.prompt_tokens)
            undo.callback(self._use.end)
            self._timer = RequestTimer(state.metrics)
            undo.callback(self._end)
            undo.callback(self._running.close)
            for request in self._requests:
                state.metrics.prompt_tokens.observe(len(request.prompt_token_ids))
            self._begin(tokenizer)
            self._held = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _begin(self, tokenizer: Tokenizer) -> None:
        sampling, reading = self._sampling, self._reading
        self.completion_tokens = 0
        self._cached_tokens = [0] * len(self._requests)
        self.prompt_logprobs = [[] for _ in self._requests]
        shown = frozenset() if reading is None else reading.shown
        self._choices = [
            AnswerChoice(
                number,
                ChoiceText(tokenizer, sampling.stop, shown),
                None if reading is None else reading.make(),
                self._ends,
            )
            for number in range(self.num_choices)
        ]
        self._generations.clear()
        for request in self._requests:
            generation = self._state.engine.generate(request)
            self._running.callback(generation.close)
            self._generations.append(generation)

    async def _begin_again(self) -> None:
        """Submit everything again after the engine died, unless a piece was sent."""
        self._running.close()
        await self._state.engine.ready()
        logger.warning("%s is begun again, since the engine died", self._name)
        self._begin(self._state.serving()[1])

    def usage(self) -> Usage:
        usage = self.usage_at(self.completion_tokens)
        proposed = sum(choice.num_draft_tokens for choice in self._choices)
        accepted = sum(choice.num_accepted_tokens for choice in self._choices)
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
            PromptTokensDetails(self.cached_tokens, self.image_tokens or UNSET),
        )

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self._choices)

    @property
    def image_tokens(self) -> int:
        """Count the prompts' rows of pictures."""
        pictures = (request.pictures for request in self._requests)
        return sum(one.num_rows for one in pictures if one is not None)

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
        assert self._generations, "an answer is read inside `with`"
        try:
            if len(self._generations) > 1:
                async for prompt, delta in merged(self._generations):
                    if pieces := self.take(prompt, delta):
                        yield pieces
                return
            (generation,) = self._generations
            async for delta in generation:
                pieces = self.take(0, delta)
                # Sends together what arrived while the client was not reading.
                while len(pieces) < MAX_TURN and (more := generation.ready()) is not None:
                    pieces += self.take(0, more)
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
                    choice.stopped_by, choice.cuts_call = piece.stopped_by, piece.cuts_call
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

    def _end(self) -> None:
        complete = bool(self._choices) and all(choice.ended for choice in self._choices)
        self._timer.end(complete=complete)
        logger.info(
            "%s: %s, %d prompt tokens (%d cached), %d generated",
            self._name,
            describe_outcome(self._request_id, complete=complete),
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
        )

    def take(self, prompt: int, delta: SequenceDelta) -> list[Piece]:
        """Return the pieces that a delta completes; none after the choice's end."""
        number = prompt * self._sampling.num_choices + delta.index
        choice = self._choices[number]
        if choice.ended:  # by a stop string, with more deltas queued
            return []
        if delta.num_cached_tokens > self._cached_tokens[prompt]:
            self._cached_tokens[prompt] = delta.num_cached_tokens
        self.prompt_logprobs[prompt] += delta.prompt_logprobs or ()
        accepted = choice.num_accepted_tokens
        choice.num_draft_tokens = delta.num_draft_tokens
        choice.num_accepted_tokens = delta.num_accepted_tokens
        if delta.token_ids:
            self._timer.tokens(number, len(delta.token_ids), delta.queue_seconds)
        if delta.queue_seconds is not None:
            self._metrics.observe_wait(self._owner, delta.queue_seconds)
        if len(delta.token_ids) < 2 or not (self._sampling.stop or self._reading):
            return self._push(prompt, choice, delta)
        # Drop tokens of the same step after its end.
        pieces: list[Piece] = []
        for kept, one in enumerate(delta.one_by_one(), 1):
            pieces += self._push(prompt, choice, one)
            if choice.ended:
                choice.num_accepted_tokens = min(delta.num_accepted_tokens, accepted + kept)
                break
        return pieces

    def _push(self, prompt: int, choice: AnswerChoice, delta: SequenceDelta) -> list[Piece]:
        self.completion_tokens += len(delta.token_ids)
        self._use.take(len(delta.token_ids))
        piece = choice.push(delta, self.completion_tokens)
        if piece is None:
            return []
        if piece.finish_reason is not None:
            self._metrics.count_choice(piece.finish_reason.value)
            if piece.finish_reason is FinishReason.TIMEOUT:
                self._metrics.count_expired(self._owner, "running")
            if delta.finish_reason is None:
                self._generations[prompt].close_choice(delta.index)
        return [piece]


def describe_outcome(request_id: str, *, complete: bool) -> str:
    """Describe the end for the log; after a failure, with the request id."""
    return "complete" if complete else f"ended early (x-request-id {request_id or '-'})"


async def merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, SequenceDelta], None]:
    """Yield the deltas of several generations as they arrive, with the generation's index.

    It needs no closing: it has no tasks of its own.

    Args:
        generations: sources; the caller closes them.

    Raises:
        Exception: the first failure of a generation.
    """
    following = dict(enumerate(generations))
    while following:
        changed = asyncio.get_running_loop().create_future()
        for number, generation in list(following.items()):
            while (delta := generation.ready()) is not None:
                yield number, delta
            if generation.is_over(then=changed):
                del following[number]
        if following:
            await changed
