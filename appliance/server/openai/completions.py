"""POST /v1/completions: formats an answer's pieces as text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.server.http.frames import FrameTemplate
from appliance.server.openai.answers import Completion, CompletionChoice
from appliance.server.openai.chunks import Chunks
from appliance.server.openai.logprobs import completion_logprobs, prompt_logprobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.server.openai.answers import CompletionLogprobs
    from appliance.server.openai.chunks import StreamUsage
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice, Piece


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
