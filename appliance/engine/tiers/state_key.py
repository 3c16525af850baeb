"""Names state checkpoints in the tiers below: the hash of their block, with a mark."""

from __future__ import annotations

_HASH_BYTES = 16
_MARK = b"s"


def state_key(content: bytes) -> bytes:
    """Return a checkpoint's key, given its block's hash."""
    return content + _MARK


def is_state(key: bytes) -> bool:
    """Return True if a key is a checkpoint's, False if a block's."""
    return len(key) > _HASH_BYTES


def block_of(key: bytes) -> bytes:
    return key[:_HASH_BYTES]
