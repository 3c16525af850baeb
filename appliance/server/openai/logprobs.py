"""Formats log probabilities: of chats, of text completions, and of prompts as vLLM does."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from appliance.server.openai.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.messages import Candidate, TokenLogprobs
    from appliance.server.openai.answers import PromptLogprobs
    from appliance.server.requests.answer import Answer
    from appliance.tokenizer import Tokenizer


def chat_logprobs(tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """Return log probabilities with each token's text and bytes."""

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


def tokens_of(
    text: str, tokens: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> Sequence[TokenLogprobs]:
    """Return the tokens that spell a text, without hidden marks around it."""
    pieces = [tokenizer.token_bytes(token.chosen.token_id) for token in tokens]
    begin = b"".join(pieces).find(text.encode())
    if begin < 0:
        return tokens
    end = begin + len(text.encode())
    ends = accumulate(map(len, pieces))
    return [
        token
        for token, piece, stop in zip(tokens, pieces, ends, strict=True)
        if stop > begin and stop - len(piece) < end
    ]


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


def prompt_logprobs(
    answer: Answer, number: int, tokenizer: Tokenizer
) -> PromptLogprobs | UnsetType:
    """Return one prompt's scores; UNSET if not requested.

    None stands for the first token, and for those up to the last picture's rows.
    """
    if not answer.scores_prompts:
        return UNSET
    reported = answer.prompt_logprobs[number]
    before = answer.prompt_lengths[number] - len(reported)
    return [*[None] * before, *(_place(one, tokenizer) for one in reported)]


def _place(scored: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    chosen = scored.chosen
    found = {chosen.token_id: (chosen.logprob, None)}
    ranks: Sequence[tuple[int, tuple[float, int | None]]] = [
        (one.token_id, (one.logprob, rank)) for rank, one in enumerate(scored.top, 1)
    ]
    return {
        str(token_id): PromptLogprob(
            logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(token_id)
        )
        for token_id, (logprob, rank) in {**found, **dict(ranks)}.items()
    }
