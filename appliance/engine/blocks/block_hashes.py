"""The names of blocks by their content: chained hashes.

A block's hash covers its tokens and everything before them, so equal hashes mean equal keys and
values. Imports no torch.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.request import Request

    Tokens = list[int] | tuple[int, ...]

_HASH_BYTES = 16
_TOKEN = "q"
TOKEN_BYTES = 8


def as_bytes(token_ids: Tokens) -> bytes:
    """Return tokens as they are hashed and compared, `TOKEN_BYTES` each."""
    return array(_TOKEN, token_ids).tobytes()


def root_hash(*parts: str) -> bytes:
    """Hash the start of a chain; equal only if all parts are equal, in number and order."""
    return blake2b(repr(parts).encode(), digest_size=_HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: Tokens) -> bytes:
    """Hash a block that follows the chain `parent`."""
    return hash_after(parent, as_bytes(token_ids))


def chain_root(request: Request, namespace: str = "") -> bytes:
    """Hash what must be equal, besides all tokens, for two requests to share blocks.

    An adapter counts by its content, which only the engine knows: a name may come to stand for
    another one. Elsewhere the version of its files stands for it.

    Args:
        namespace: everything else that decides the bytes in a block: weights, KV format.
    """
    adapter = request.adapter
    mark = () if adapter is None else (adapter.digest or f"{adapter.path} {adapter.stamp}",)
    return root_hash(namespace, request.cache_salt, *mark)


def extend_chain(
    hashes: list[bytes], parent: bytes, token_ids: Tokens, block_size: int, num_blocks: int
) -> None:
    """Extend the hashes of a text's full blocks to `num_blocks` of them.

    Args:
        hashes: of its first blocks.
        parent: the last of these, or the root of the chain.
    """
    for index in range(len(hashes), num_blocks):
        parent = block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])
        hashes.append(parent)


def hash_after(parent: bytes, tokens: bytes) -> bytes:
    """Hash what follows the chain `parent`; `tokens` as `as_bytes` makes them."""
    return blake2b(parent + tokens, digest_size=_HASH_BYTES).digest()
