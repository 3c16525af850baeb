"""Indexes blocks by content; `block_hashes` names it.

Knows neither reference counts nor eviction. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.engine.blocks.block_hashes import (
    TOKEN_BYTES,
    as_bytes,
    chain_root,
    extend_chain,
    hash_after,
)

if TYPE_CHECKING:
    from appliance.engine.nouns.sequence import Sequence

MAX_COMPARED = 8  # blocks to compare for a partial hit


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that hold the first tokens of a sequence.

    Attributes:
        blocks: in order; used whole, except that `num_tokens` may end inside the last one.
        num_tokens: leading tokens in them.
        checkpoint: content of the state checkpoint to continue from, or empty.
        num_alike: leading tokens in cached blocks, also those after the checkpoint, which must run
            again.
    """

    blocks: tuple[int, ...] = ()
    num_tokens: int = 0
    checkpoint: bytes = b""
    num_alike: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    content: bytes  # its hash
    parent: bytes  # hash of the chain before it
    tokens: bytes  # its own tokens


class PrefixCache:
    """Maps content to blocks and back.

    Finds full blocks by hash. Where a chain of hits ends, a partial hit is a block that follows the
    same chain and begins with the same tokens: a full one that continues differently, or the
    partial last block of an ended sequence.

    Of full blocks with equal content it finds one; the others are spares. When the found one is
    removed, a spare takes its place, so the blocks after it stay findable.

    Args:
        namespace: other facts that determine a block's bytes: weights, KV format.
        splits_full: the first tokens of a full block are usable without the others.

    Attributes:
        min_partial: fewest tokens worth a partial hit: copying a block costs about as much as
            computing a token or two.
    """

    def __init__(self, block_size: int, namespace: str = "", *, splits_full: bool = True) -> None:
        self.min_partial = max(1, block_size // 8)
        self._block_size = block_size
        self._namespace = namespace
        self._splits_full = splits_full
        self._blocks: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._spares: dict[bytes, list[int]] = {}  # by content
        # By the chain before them and their first `min_partial` tokens, most recent last.
        self._starts: dict[bytes, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._entries

    def is_found(self, block: int) -> bool:
        """Return True if a block is indexed and no spare."""
        entry = self._entries.get(block)
        return entry is not None and self._blocks[entry.content] == block

    def extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Extend the sequence's `block_hashes` to its first `num_blocks` full blocks."""
        hashes = sequence.block_hashes
        if len(hashes) < num_blocks:
            parent = self._chain(sequence, len(hashes))
            extend_chain(hashes, parent, sequence.token_ids, self._block_size, num_blocks)

    def find(self, sequence: Sequence) -> Prefix:
        """Return the blocks that hold a sequence's first tokens, except those that must run."""
        size, limit = self._block_size, sequence.num_reusable
        found = self.find_chain(sequence)
        first = len(found) * size
        tokens = as_bytes(sequence.token_ids[first : min(first + size, limit)])
        block, num_tokens = self._find_start(self._chain(sequence, len(found)), tokens)
        if num_tokens:
            found.append(block)
        return Prefix(tuple(found), first + num_tokens)

    def find_chain(self, sequence: Sequence) -> list[int]:
        """Return the full blocks that hold a sequence's first tokens, as far as it may use them."""
        num_blocks = sequence.num_reusable // self._block_size
        self.extend_hashes(sequence, num_blocks)
        return self.find_full(sequence.block_hashes[:num_blocks])

    def find_full(self, hashes: list[bytes]) -> list[int]:
        """Return the blocks of a chain's longest indexed prefix."""
        found: list[int] = []
        for content in hashes:
            block = self._blocks.get(content)
            if block is None:
                break
            found.append(block)
        return found

    def get(self, content: bytes) -> int | None:
        return self._blocks.get(content)

    def add(self, sequence: Sequence, index: int, block: int, num_tokens: int) -> None:
        """Index a block; a full one whose content is indexed already becomes a spare.

        Args:
            sequence: the sequence whose tokens it holds.
            index: its index in the sequence's block table.
            num_tokens: in it: the block size, or at least `min_partial`.
        """
        size = self._block_size
        is_full = num_tokens == size
        first = index * size
        tokens = as_bytes(sequence.token_ids[first : first + num_tokens])
        parent = self._chain(sequence, index)
        content = sequence.block_hashes[index] if is_full else hash_after(parent, tokens)
        found = self._blocks.get(content)
        if found == block or (found is not None and not is_full):
            return
        assert block not in self._entries, f"block {block} is indexed under another hash"
        self._entries[block] = _Entry(content, parent, tokens)
        if found is None:
            self._find_under(content, block)
        else:
            self._spares.setdefault(content, []).append(block)

    def remove(self, block: int) -> bytes | None:
        """Remove a block; return its hash, or None if another block still has the content."""
        entry = self._entries.pop(block)
        spares = self._spares.pop(entry.content, [])
        if self._blocks[entry.content] != block:
            spares.remove(block)
        else:
            self._lose(entry, block)
            if spares:
                self._find_under(entry.content, spares.pop())
        if spares:
            self._spares[entry.content] = spares
        return None if entry.content in self._blocks else entry.content

    def _find_under(self, content: bytes, block: int) -> None:
        entry = self._entries[block]
        self._blocks[content] = block
        if self._splits(entry):
            self._starts.setdefault(self._start(entry), {})[block] = None

    def _lose(self, entry: _Entry, block: int) -> None:
        del self._blocks[entry.content]
        if self._splits(entry):
            followers = self._starts[self._start(entry)]
            del followers[block]
            if not followers:
                del self._starts[self._start(entry)]

    def _splits(self, entry: _Entry) -> bool:
        """Return True if an entry's first tokens are usable without the others."""
        return self._splits_full or len(entry.tokens) < self._block_size * TOKEN_BYTES

    def _chain(self, sequence: Sequence, num_blocks: int) -> bytes:
        """Return the hash of a sequence's first full blocks, which must be hashed already."""
        if num_blocks:
            return sequence.block_hashes[num_blocks - 1]
        return chain_root(sequence.request, self._namespace)

    def _start(self, entry: _Entry) -> bytes:
        return entry.parent + entry.tokens[: self.min_partial * TOKEN_BYTES]

    def _find_start(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """Return the block after a chain with the most tokens in common, and their number."""
        best = (-1, 0)
        start = tokens[: self.min_partial * TOKEN_BYTES]
        if len(start) < self.min_partial * TOKEN_BYTES:
            return best
        followers = self._starts.get(parent + start, {})
        for block, _ in zip(reversed(followers), range(MAX_COMPARED), strict=False):
            common = num_common(self._entries[block].tokens, tokens) // TOKEN_BYTES
            if common > best[1]:
                best = block, common
        return best

    def check_invariants(self) -> None:
        blocks = [*self._blocks.items()]
        spares = [(content, block) for content, of in self._spares.items() for block in of]
        assert {block: entry.content for block, entry in self._entries.items()} == {
            block: content for content, block in blocks + spares
        }
        assert len(self._entries) == len(blocks) + len(spares), "a block is indexed twice"
        assert self._spares.keys() <= self._blocks.keys(), "a spare has nobody to stand in for"
        splitting = {
            block: self._start(entry)
            for block, entry in self._entries.items()
            if self.is_found(block) and self._splits(entry)
        }
        assert splitting == {b: start for start, blocks in self._starts.items() for b in blocks}
        assert all(self._starts.values())


def num_common(a: bytes, b: bytes) -> int:
    """Count the bytes with which both begin."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
