"""Formats log probabilities for chat completions."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from appliance.server.openai.answers import ChatLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.nouns.messages import Candidate, TokenLogprobs
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
