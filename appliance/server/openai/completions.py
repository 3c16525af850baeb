"""POST /v1/completions: formats an answer's pieces as text completions, and scores a given text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import RequestError
from appliance.server.http.frames import FrameTemplate
from appliance.server.openai.answers import Completion, CompletionChoice, CompletionLogprobs
from appliance.server.openai.chunks import Chunks
from appliance.server.openai.logprobs import completion_logprobs, prompt_logprobs
from appliance.server.requests.answer import Answer
from appliance.server.requests.answer_size import check_answer
from appliance.server.requests.exchange import Exchange, PromptTokensDetails, Usage
from appliance.server.requests.grammars import grammar_of
from appliance.server.requests.prompt import prompt_text
from appliance.server.requests.sampling import completion_budget
from appliance.server.requests.terms import Terms

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.server.models.model_state import ModelState
    from appliance.server.openai.chunks import StreamUsage
    from appliance.server.requests.pieces import FinishedChoice, Piece
    from appliance.server.requests.schema import CompletionRequest


def completion_frames(
    exchange: Exchange, answer: Answer, *, usage: StreamUsage, echo: Sequence[str]
) -> AsyncGenerator[bytes, None]:
    """Yield frames: text, an empty text with the finish reason, usage, [DONE].

    Args:
        echo: text before each choice.
    """
    chunk = Completion(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=[],
        system_fingerprint=exchange.fingerprint,
    )
    chunks = Chunks(chunk, answer, usage)
    offsets = [0] * answer.num_choices

    def frame(
        number: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        return chunks.frame(CompletionChoice(number, text, logprobs, finish_reason))

    templates: dict[int, FrameTemplate] = {}  # of choices begun

    def frames_of(piece: Piece) -> bytes:
        number, frames = piece.choice, b""
        if number not in templates:
            templates[number] = FrameTemplate(frame(number, FrameTemplate.MARK))
            if echo[number]:
                frames = frame(number, echo[number])
        chunks.count(piece)
        if exchange.logprobs and (piece.text or piece.tokens):
            logprobs = completion_logprobs(piece.tokens, exchange.tokenizer, offsets[number])
            offsets[number] += sum(map(len, logprobs.tokens))
            frames += frame(number, piece.text, logprobs)
        elif piece.text and usage.in_chunks:
            frames += frame(number, piece.text)
        elif piece.text:
            frames += templates[number].fill(piece.text)
        if piece.finish_reason is not None:
            frames += frame(number, "", None, piece.finish_reason.value)
        return frames

    return chunks.frames(frames_of)


def whole_completion(
    exchange: Exchange, answer: Answer, wholes: Sequence[FinishedChoice], *, echo: Sequence[str]
) -> Completion:
    """Build the answer as one object from ended choices; see `completion_frames`."""
    per_prompt = len(wholes) // len(answer.prompt_logprobs)
    choices = [
        CompletionChoice(
            index=number,
            text=echo[number] + whole.text,
            logprobs=(
                completion_logprobs(whole.tokens, exchange.tokenizer, 0)
                if exchange.logprobs
                else None
            ),
            finish_reason=whole.finish_reason,
            cumulative_logprob=whole.cumulative_logprob,
            prompt_logprobs=prompt_logprobs(answer, number // per_prompt, exchange.tokenizer),
        )
        for number, whole in enumerate(wholes)
    ]
    return Completion(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=choices,
        usage=answer.usage(),
        system_fingerprint=exchange.fingerprint,
    )


@dataclass(frozen=True, slots=True)
class EchoScoring:
    """A request that scores its prompts, with echo: for evaluation harnesses.

    The answer repeats the prompts. The engine scores their tokens in whole chunks as it computes
    them.

    Attributes:
        answer: the engine's.
        prompts: token ids of each prompt.
        generated: tokens after each prompt, 0 or 1.
    """

    exchange: Exchange
    answer: Answer
    prompts: list[list[int]]
    texts: list[str]
    generated: int

    @classmethod
    def begin(
        cls,
        state: ModelState,
        body: CompletionRequest,
        prompts: list[list[int]],
        *,
        owner: str,
        request_id: str,
    ) -> EchoScoring:
        """Prepare one request per prompt.

        Raises:
            RequestError: the body requests more than scores and one token.
        """
        generated = body.max_tokens or 0
        for name, value in (
            ("n", body.n or 1),
            ("best_of", body.best_of or 1),
            ("max_tokens", generated),
        ):
            if not 0 <= value <= 1:
                raise RequestError(
                    f"echo together with logprobs scores a prompt, and takes {name} up to 1,"
                    f" not {value}",
                    param=name,
                )
        if (found := grammar_of(body)) is not None:
            raise RequestError(
                f"echo together with logprobs scores a prompt; leave {found[0]} out", param=found[0]
            )
        for name in ("prompt_logprobs", "suffix"):
            if getattr(body, name) not in (None, ""):
                raise RequestError(
                    f"echo together with logprobs says it of the prompt; leave {name} out",
                    param=name,
                )
        if body.use_beam_search:
            raise RequestError(
                "echo together with logprobs scores a prompt and searches nothing; leave "
                "use_beam_search out",
                param="use_beam_search",
            )
        if body.stream:
            raise RequestError(
                "echo together with logprobs is not streamed; leave stream out", param="stream"
            )
        info, tokenizer = state.serving()
        longest = max(map(len, prompts)) + generated
        check_answer(len(prompts), 1, longest, body.logprobs, param="prompt")
        terms = Terms.of(body, state, owner)
        scored = body.logprobs is not None
        exchange = Exchange.begin(state, "cmpl-", terms.adapter, logprobs=scored)
        requests = []
        for number, prompt in enumerate(prompts):
            completion_budget(len(prompt), generated, info, param="prompt")
            sampling = SamplingParams(
                max_tokens=generated,
                temperature=0.0,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs or 0,
                ignore_eos=True,
            )
            requests.append(
                terms.request(
                    f"{exchange.id}-{number}" if len(prompts) > 1 else exchange.id,
                    prompt,
                    sampling,
                )
            )
        texts = prompt_text(body.prompt, tokenizer)
        return cls(
            exchange, Answer(state, requests, request_id=request_id), prompts, texts, generated
        )

    def completion(self, wholes: Sequence[FinishedChoice]) -> Completion:
        """Build the answer: prompts with scores, then generated text."""
        choices = [self._choice(number, whole) for number, whole in enumerate(wholes)]
        read, made = sum(map(len, self.prompts)), self.generated * len(self.prompts)
        return Completion(
            id=self.exchange.id,
            created=self.exchange.created,
            model=self.exchange.model,
            choices=choices,
            usage=Usage(read, made, read + made, PromptTokensDetails(0)),
            system_fingerprint=self.exchange.fingerprint,
        )

    def _choice(self, number: int, whole: FinishedChoice) -> CompletionChoice:
        prompt, tokenizer = self.prompts[number], self.exchange.tokenizer
        first = tokenizer.token_text(prompt[0])
        tokens = [*self.answer.prompt_logprobs[number], *whole.tokens]
        logprobs = None
        if self.exchange.logprobs:
            scored = completion_logprobs(tokens, tokenizer, len(first))
            logprobs = CompletionLogprobs(
                tokens=[first, *scored.tokens],
                token_logprobs=[None, *scored.token_logprobs],
                top_logprobs=[None, *scored.top_logprobs],
                text_offset=[0, *scored.text_offset],
            )
        after = [token.chosen.token_id for token in tokens[len(prompt) - 1 :]]
        return CompletionChoice(
            index=number,
            text=self.texts[number] + tokenizer.decode(after),
            logprobs=logprobs,
            finish_reason=whole.finish_reason,
        )
