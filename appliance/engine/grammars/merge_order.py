"""Tokenizes texts with the vocabulary alone. Imports no torch."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.messages import Vocabulary

MAX_KEPT = 4096  # pieces whose tokens are cached
_PIECE = re.compile(rb" ?[^ ]{1,64}| +")  # merges hardly ever cross the left side of a space


class MergeOrder:
    """Byte pair encoding for a vocabulary whose ids are in merge order.

    Nearly all are, and `vocabulary_of` checks. The bytes are right for any vocabulary that has
    every byte; in merge order the tokens are also those of the model's training.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = set(vocabulary.special)
        self._ids = {
            token: token_id
            for token_id, token in enumerate(vocabulary.tokens)
            if token and token_id not in special
        }
        self._spell = lru_cache(MAX_KEPT)(self._merge)

    def __call__(self, text: bytes) -> list[int]:
        """Return the token ids of a text, up to a byte that no token has."""
        found: list[int] = []
        for piece in _PIECE.findall(text):
            ids = self._spell(piece)
            found += ids
            if not ids:
                break
        return found

    def _merge(self, piece: bytes) -> tuple[int, ...]:
        parts = [piece[at : at + 1] for at in range(len(piece))]
        ids = self._ids
        if not all(part in ids for part in parts):
            return ()
        while True:
            pairs = [(ids.get(a + b, -1), at) for at, (a, b) in enumerate(pairwise(parts))]
            token_id, at = min((pair for pair in pairs if pair[0] >= 0), default=(-1, 0))
            if token_id < 0:
                return tuple(ids[part] for part in parts)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
