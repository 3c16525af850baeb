"""A model that is a hash: the contents of its cache, and the next tokens.

A slot holds a hash of the slot before it and of its token, so each depends on all tokens before it,
and the next token is a hash of the last slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request

VOCAB = 48
EOS = 3
# A rare stop string, and so many that sometimes every continuation of a beam ends it.
STOPS = (("ab",), ("a", "b", "x", "y"))
# The text of each token, so that a stop string comes whole, in parts, and across a token without
# text.
TEXTS = [("a", "b", "x", "ab", "", "y", "b.", "z", ".a", "v", "u", "w")[i % 12] for i in range(48)]


def stop_pieces(stop: tuple[str, ...]) -> dict[int, bytes]:
    """The texts of tokens that may be part of a stop string."""
    letters = set("".join(stop))
    return {t: x.encode() for t, x in enumerate(TEXTS) if stop and (not x or set(x) & letters)}


def content_of(salt: str, previous: int, token: int) -> int:
    """The content of a slot."""
    return hash((salt != "", len(salt), previous, token))


def next_token(content: int, index: int) -> int:
    """The model's token after the last slot; `index` is the choice of the request."""
    return hash((content, index)) % VOCAB


def logprob_of(content: int, index: int) -> float:
    """The log probability of that token; a sum of them is exact in any order.

    Otherwise the last bits of two sums would decide between equally likely answers.
    """
    return -1 / 128 - hash((content, index, -3)) % 997 / 512


def ranking(content: int, request: Request, num_tokens: int, count: int) -> list[tuple[int, float]]:
    """The continuations of a beam, the likeliest first, each with its log probability.

    With stop strings there are so few that sometimes all of them end.

    Args:
        content: of the last slot.
        request: that of the beam.
        num_tokens: of the answer so far; the first `min_tokens` end nothing.
        count: the most to return.
    """
    sampling = request.sampling
    banned: set[int] = set()
    if num_tokens < sampling.min_tokens:
        banned = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    first = hash((content, -2)) % VOCAB
    found = []
    logprob = -0.02 - hash((content, -4)) % 997 / 500  # shorter answers may thus be better
    for place in range(VOCAB):
        token = (first + place) % VOCAB
        if token not in banned:
            found.append((token, logprob))
        logprob -= 0.05 + hash((content, place)) % 1_000_003 / 1_000_003  # no two are equal
    return found[: sampling.num_sequences if sampling.stop else count]
