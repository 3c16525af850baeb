"""POST /v1/completions: formats an answer's pieces as text completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.server.http.frames import DONE, FrameTemplate, data_frame
from appliance.server.openai.answers import Completion, CompletionChoice, CompletionLogprobs
from appliance.server.openai.prompt_logprobs import prompt_logprobs

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.engine.nouns.messages import TokenLogprobs
    from appliance.server.openai.stream_usage import StreamUsage
    from appliance.server.requests.answer import Answer
    from appliance.server.requests.exchange import Exchange
    from appliance.server.requests.pieces import FinishedChoice, Piece
    from appliance.tokenizer import Tokenizer


async def completion_frames(
    exchange: Exchange, answer: Answer, *, usage: StreamUsage, echo: Sequence[str]
) -> AsyncGenerator[bytes, None]:
    """Yield frames: text, an empty text with the finish reason, usage, [DONE].

    Args:
        echo: text before each choice.
    """
    head = Completion(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=[],
        system_fingerprint=exchange.fingerprint,
    )
    if usage.at_end:
        head.usage = answer.usage_at(0) if usage.in_chunks else None
    offsets = [0] * answer.num_choices

    def frame(
        number: int,
        text: str,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        head.choices = [CompletionChoice(number, text, logprobs, finish_reason)]
        return data_frame(head)

    templates: dict[int, FrameTemplate] = {}  # of choices begun

    def frames_of(piece: Piece) -> bytes:
        number, frames = piece.choice, b""
        if number not in templates:
            templates[number] = FrameTemplate(frame(number, FrameTemplate.MARK))
            if echo[number]:
                frames = frame(number, echo[number])
        if usage.in_chunks:
            head.usage = answer.usage_at(piece.completion_tokens)
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

    async for pieces in answer.pieces():
        yield b"".join(map(frames_of, pieces))
    if usage.at_end:
        head.choices = []
        head.usage = answer.usage()
        yield data_frame(head)
    yield DONE


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


def completion_logprobs(
    tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int
) -> CompletionLogprobs:
    """Return log probabilities with each token's text; the first starts at `offset`."""
    found = CompletionLogprobs([], [], [], [])
    for token in tokens:
        text = tokenizer.token_text(token.chosen.token_id)
        top = {text: token.chosen.logprob}
        for candidate in token.top:
            # Among tokens with the same text, keep the likeliest.
            top.setdefault(tokenizer.token_text(candidate.token_id), candidate.logprob)
        found.tokens.append(text)
        found.token_logprobs.append(token.chosen.logprob)
        found.top_logprobs.append(top)
        found.text_offset.append(offset)
        offset += len(text)
    return found
