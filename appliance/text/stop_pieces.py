"""Finds the tokens that can be part of a stop string, for the engine.

The engine has no tokenizer, but must stop a beam at a string itself: the other beams depend on it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.sampling_params import SamplingParams
    from appliance.tokenizer import Tokenizer


def stop_pieces(tokenizer: Tokenizer, sampling: SamplingParams) -> dict[int, bytes]:
    """Return bytes by token id for `Request.stop_pieces`; empty unless beams have stop strings.

    Takes 0.1 s for a large vocabulary; cached per set of strings.
    """
    if not (sampling.use_beam_search and sampling.stop):
        return {}
    return _pieces(tokenizer, sampling.stop)


@lru_cache(maxsize=32)
def _pieces(tokenizer: Tokenizer, stop: tuple[str, ...]) -> dict[int, bytes]:
    wanted = [string.encode() for string in stop]
    starts = tuple({one[:end] for one in wanted for end in range(1, len(one) + 1)})
    ends = tuple({one[start:] for one in wanted for start in range(len(one))})
    pieces = {}
    for token_id in range(tokenizer.vocab_size):
        piece = tokenizer.visible_bytes(token_id)
        if (
            not piece  # an invisible token joins its neighbours
            or piece.endswith(starts)
            or piece.startswith(ends)
            or any(piece in one or one in piece for one in wanted)
        ):
            pieces[token_id] = piece
    return pieces
