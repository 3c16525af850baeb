"""What an echo reports beside its tokens: log probabilities, pooled states."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from appliance.engine.nouns.messages import Candidate, TokenLogprobs

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request


def reported(token: int, logprob: float, count: int) -> TokenLogprobs:
    """A token with that log probability, and `count` likely ones."""
    others = (Candidate((token + rank) % 256, -0.5 - rank) for rank in range(count))
    return TokenLogprobs(Candidate(token, logprob), tuple(others))


def pooled(request: Request) -> bytes | None:
    """How often the prompt contains each of the first tokens, and its length; labels likewise."""
    if request.pooling is None:
        return None
    prompt = request.prompt_token_ids
    counts = [float(prompt.count(token)) for token in request.labels or range(97, 104)]
    return array("f", counts if request.labels else [*counts, float(len(prompt))]).tobytes()
