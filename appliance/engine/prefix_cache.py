"""Which block holds which content: chained hashes of full blocks and an index over them.

A block's hash covers its tokens and everything before them, so equal hashes mean equal keys and
values. Knows nothing of reference counts or eviction. Imports no torch.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.sequence import Sequence

_HASH_BYTES = 16


def root_hash(*parts: str) -> bytes:
    """Start of a chain; chains share content only if all parts are equal, in number and order."""
    return blake2b(repr(parts).encode(), digest_size=_HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Hash of a full block that follows the chain `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=_HASH_BYTES).digest()


class PrefixCache:
    """An index from content to block and back.

    Args:
        block_size: token slots in a block.
        namespace: whatever else decides the bytes in a block: weights, KV format.
    """

    def __init__(self, block_size: int, namespace: str = "") -> None:
        self._block_size = block_size
        self._namespace = namespace
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._hashes

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Make the sequence's `block_hashes` cover its first `num_blocks` full blocks."""
        hashes = sequence.block_hashes
        if len(hashes) >= num_blocks:
            return
        size = self._block_size
        # An adapter, once requests have one, is one more part here.
        parent = hashes[-1] if hashes else root_hash(self._namespace, sequence.request.cache_salt)
        for index in range(len(hashes), num_blocks):
            parent = block_hash(parent, sequence.token_ids[index * size : (index + 1) * size])
            hashes.append(parent)

    def find(self, hashes: list[bytes]) -> list[int]:
        """Blocks of the longest indexed start of a chain."""
        found: list[int] = []
        for content in hashes:
            block = self._blocks.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def get(self, content: bytes) -> int | None:
        """The block indexed under a hash."""
        return self._blocks.get(content)

    def add(self, content: bytes, block: int) -> None:
        """Index a block under the hash of its content, unless another block stands there."""
        if content not in self._blocks:
            assert block not in self._hashes, f"block {block} is indexed under another hash"
            self._blocks[content] = block
            self._hashes[block] = content

    def remove(self, block: int) -> bytes:
        """Forget a block, whose content is about to be overwritten; returns its hash."""
        content = self._hashes.pop(block)
        del self._blocks[content]
        return content

    def check_invariants(self) -> None:
        """Assert that both directions agree."""
        assert self._hashes == {block: content for content, block in self._blocks.items()}
        assert len(self._hashes) == len(self._blocks)
