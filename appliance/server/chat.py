"""POST /v1/chat/completions: pieces of an answer in the shape of chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.server.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    TokenLogprob,
    TopLogprob,
)
from appliance.server.stream import DONE, FrameTemplate, data_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from appliance.engine.messages import Candidate, TokenLogprobs
    from appliance.server.answer import Answer, Piece, Whole
    from appliance.server.exchange import Exchange
    from appliance.tokenizer import Tokenizer


async def chat_frames(
    exchange: Exchange, answer: Answer, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Frames: role first, then content, an empty delta with the reason, usage, [DONE]."""
    head = ChatChunk(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=[],
        system_fingerprint=exchange.fingerprint,
    )
    if include_usage:
        head.usage = None

    def frame(
        number: int,
        delta: ChatDelta,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        head.choices = [ChatChunkChoice(number, delta, logprobs, finish_reason)]
        return data_frame(head)

    templates: dict[int, FrameTemplate] = {}  # of the choices that have begun

    def frames_of(piece: Piece) -> bytes:
        number, frames = piece.choice, b""
        if number not in templates:
            frames = frame(number, ChatDelta(role="assistant", content=""))
            templates[number] = FrameTemplate(frame(number, ChatDelta(content=FrameTemplate.MARK)))
        if piece.tokens:
            logprobs = chat_logprobs(piece.tokens, exchange.tokenizer)
            frames += frame(number, ChatDelta(content=piece.text), logprobs)
        elif piece.text:
            frames += templates[number].fill(piece.text)
        if piece.finish_reason is not None:
            frames += frame(number, ChatDelta(), None, piece.finish_reason.value)
        return frames

    async for pieces in answer.pieces():
        yield b"".join(map(frames_of, pieces))
    if include_usage:
        head.choices = []
        head.usage = answer.usage()
        yield data_frame(head)
    yield DONE


def whole_chat(exchange: Exchange, answer: Answer, wholes: Sequence[Whole]) -> ChatCompletion:
    """The answer in one object, of choices that have ended."""
    choices = [
        ChatChoice(
            index=number,
            message=AssistantMessage(whole.text),
            logprobs=chat_logprobs(whole.tokens, exchange.tokenizer) if exchange.logprobs else None,
            finish_reason=whole.finish_reason,
            cumulative_logprob=whole.cumulative_logprob,
        )
        for number, whole in enumerate(wholes)
    ]
    return ChatCompletion(
        id=exchange.id,
        created=exchange.created,
        model=exchange.model,
        choices=choices,
        usage=answer.usage(),
        system_fingerprint=exchange.fingerprint,
    )


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """Log probabilities with the text and bytes of every token."""

    def entry(candidate: Candidate) -> TopLogprob:
        token_id = candidate.token_id
        return TopLogprob(
            tokenizer.token_text(token_id), candidate.logprob, list(tokenizer.token_bytes(token_id))
        )

    content = []
    for token in tokens:
        chosen = entry(token.chosen)
        top = [entry(candidate) for candidate in token.top]
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)
