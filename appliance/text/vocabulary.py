"""Builds the vocabulary that grammars need in the engine, which has no tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.engine.grammars.merge_order import MergeOrder
from appliance.engine.nouns.messages import Vocabulary

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer

# The kind of text that schemas and tools fix: names, quotes, words and figures.
_SAMPLE = (
    '{"first_name": "Bob", "currentTemperature": 21, "is_raining": false, "HTTPServerError": null,'
    ' "name": "get_weather", "arguments": {"unit": "celsius or fahrenheit", "zip-code": [75002]}}'
)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return a tokenizer's vocabulary; takes some tenths of a second for a large one."""
    tokens, special = tokenizer.vocabulary()
    found = Vocabulary(tuple(tokens), tuple(special))
    ids = tokenizer.encode(_SAMPLE, add_special_tokens=False)
    text = b"".join(tokens[token_id] for token_id in ids)
    return Vocabulary(found.tokens, found.special, in_order=MergeOrder(found)(text) == ids)
