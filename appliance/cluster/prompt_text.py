"""Hashes a prompt's text in chained blocks, as the prefix cache hashes its tokens.

The router has no tokenizer. Prompts that begin with the same text begin with the same tokens, so
the text also shows which replica has them cached. Imports no Ray.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from appliance.engine.blocks.block_hashes import extend_chain, root_hash

BYTES_A_TOKEN = 4  # about, for English; in other languages it remembers more or less

# Fields with prompt text, in the order of templates. A conversation grows at the end of one of the
# last.
_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")
_TEXT = "I"  # four bytes per token


def text_hashes(body: bytes, owner: str, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks; none if the body is no JSON object.

    Args:
        body: of a request in any protocol.
        owner: the API key; prompts of one key share the cache.
    """
    try:
        fields = msgspec.json.decode(body)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    text = b"\0".join(_growing(fields[name]) for name in _FIELDS if name in fields)
    words = array(_TEXT, text[: len(text) // BYTES_A_TOKEN * BYTES_A_TOKEN]).tolist()
    root = root_hash(owner, str(fields.get("model", "")), str(fields.get("cache_salt", "")))
    found: list[bytes] = []
    extend_chain(found, root, words, block_size, len(words) // block_size)
    return found


def _growing(value: Any) -> bytes:
    """Encode a value so that a longer one begins with a shorter one's bytes."""
    if isinstance(value, list):
        return b"".join(msgspec.json.encode(item) + b"," for item in value)
    return msgspec.json.encode(value)[:-1]
