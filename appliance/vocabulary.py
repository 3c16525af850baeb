"""Builds the vocabulary that the engine, which has no tokenizer, needs for grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.messages import Vocabulary

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return a tokenizer's vocabulary; takes some tenths of a second for a large one."""
    tokens, special = tokenizer.vocabulary()
    return Vocabulary(tuple(tokens), tuple(special))
