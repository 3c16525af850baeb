"""What the engine needs for grammars: the bytes of every token. It has no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.messages import Vocabulary

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer; takes some tenths of a second for a large one."""
    tokens, special = tokenizer.vocabulary()
    return Vocabulary(tuple(tokens), tuple(special))
