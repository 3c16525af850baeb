"""Hashes the text of a request's prompt in chained blocks, as the prefix cache hashes its tokens.

Who routes requests in a cluster has no tokenizer. Two prompts that begin with the same text begin
with the same tokens, so the text tells as well which replica knows them. Imports no Ray.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from appliance.engine.blocks.block_hashes import extend_chain, root_hash

BYTES_A_TOKEN = 4  # of English text, about; other languages differ, and so does what is remembered

# Fields with a prompt's text, in the order in which templates put them. A conversation grows at
# the end of one of the last.
_FIELDS = ("tools", "system", "instructions", "prompt", "messages", "input")
_TEXT = "I"  # four bytes stand for a token


def text_hashes(body: bytes, owner: str, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks; none if the body is not a JSON object.

    Args:
        body: of a request in any protocol.
        owner: whose prompts share a cache with this one.
        block_size: tokens of a block.
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
    """Encode a value so that a longer one begins with the bytes of the shorter one."""
    if isinstance(value, list):
        return b"".join(msgspec.json.encode(item) + b"," for item in value)
    return msgspec.json.encode(value)[:-1]
