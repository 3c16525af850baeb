"""Names blocks by content, with chained hashes, and state checkpoints by the hash of their block.

A block's hash covers its tokens and everything before them, so equal hashes mean equal keys and
values. Imports no torch.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.request import Request

    Tokens = list[int] | tuple[int, ...]


_HASH_BYTES = 16
_MARK = b"s"
_TOKEN = "q"
TOKEN_BYTES = 8


def as_bytes(token_ids: Tokens) -> bytes:
    """Return tokens as bytes to hash and compare, `TOKEN_BYTES` each."""
    return array(_TOKEN, token_ids).tobytes()


def root_hash(*parts: str) -> bytes:
    """Hash the start of a chain; equal only for equal parts in the same order."""
    return blake2b(repr(parts).encode(), digest_size=_HASH_BYTES).digest()


def chain_root(request: Request, namespace: str = "") -> bytes:
    """Hash everything but the tokens that two requests must have in common to share blocks.

    Adapters count by content, which only the engine knows, because a name can change its meaning.
    Elsewhere the version of the files stands for it.

    Args:
        namespace: other facts that determine a block's bytes: weights, KV format.
    """
    adapter = request.adapter
    mark = () if adapter is None else (adapter.digest or f"{adapter.path} {adapter.stamp}",)
    return root_hash(namespace, request.cache_salt, *mark)


def extend_chain(
    hashes: list[bytes], parent: bytes, token_ids: Tokens, block_size: int, num_blocks: int
) -> None:
    """Extend a text's block hashes to its first `num_blocks` full blocks; `parent` is the last."""
    for index in range(len(hashes), num_blocks):
        parent = block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


def block_hash(parent: bytes, token_ids: Tokens) -> bytes:
    return hash_after(parent, as_bytes(token_ids))


def hash_after(parent: bytes, tokens: bytes) -> bytes:
    """Hash a block after the chain `parent`; `tokens` come from `as_bytes`."""
    return blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()


def state_key(content: bytes) -> bytes:
    """Return a checkpoint's key, given its block's hash."""
    return content + _MARK


def is_state(key: bytes) -> bool:
    """Return True if a key is a checkpoint's, False if a block's."""
    return len(key) > _HASH_BYTES


def block_of(key: bytes) -> bytes:
    return key[:_HASH_BYTES]
