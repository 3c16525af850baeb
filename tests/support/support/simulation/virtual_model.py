"""A model that is a hash: what its cache holds, and what follows.

A slot holds a hash of the slot before it and of its token, so each depends on all before it, and
the next token is a hash of the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request

VOCAB = 48
EOS = 3
# One that is rare, and so many that now and then all that may follow a beam ends it.
STOPS = (("ab",), ("a", "b", "x", "y"))
# Of each token, so that a stop string comes whole, in parts, and across a token without any text.
TEXTS = [("a", "b", "x", "ab", "", "y", "b.", "z", ".a", "v", "u", "w")[i % 12] for i in range(48)]


def stop_pieces(stop: tuple[str, ...]) -> dict[int, bytes]:
    """The texts of tokens that may be part of a stop string."""
    letters = set("".join(stop))
    return {t: x.encode() for t, x in enumerate(TEXTS) if stop and (not x or set(x) & letters)}


def content_of(salt: str, previous: int, token: int) -> int:
    """What a slot holds."""
    return hash((salt != "", len(salt), previous, token))


def next_token(content: int, index: int) -> int:
    """What the model says after the last slot; `index` is the choice of the request."""
    return hash((content, index)) % VOCAB


def logprob_of(content: int, index: int) -> float:
    """What the model thinks of that token, so that sums are exact in any order.

    Else two answers as likely as each other would be told apart by the last bits of their sums.
    """
    return -1 / 128 - hash((content, index, -3)) % 997 / 512


def ranking(content: int, request: Request, num_tokens: int, count: int) -> list[tuple[int, float]]:
    """What may follow a beam, the likeliest first, each with its log probability.

    With stop strings there are so few that sometimes all of them end.

    Args:
        content: of the last slot.
        request: whose beam it is.
        num_tokens: of the answer so far; the first `min_tokens` end nothing.
        count: as many as that, or as there are.
    """
    sampling = request.sampling
    banned: set[int] = set()
    if num_tokens < sampling.min_tokens:
        banned = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    first = hash((content, -2)) % VOCAB
    found = []
    logprob = -0.02 - hash((content, -4)) % 997 / 500  # so that shorter answers may be better ones
    for place in range(VOCAB):
        token = (first + place) % VOCAB
        if token not in banned:
            found.append((token, logprob))
        logprob -= 0.05 + hash((content, place)) % 1_000_003 / 1_000_003  # no two are equal
    return found[: sampling.num_sequences if sampling.stop else count]
