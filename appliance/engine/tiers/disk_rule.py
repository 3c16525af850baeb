"""Chooses the blocks that may go to disk, and words the rule for users.

Finished conversations, one-time questions and load tests repeat nothing, so they leave nothing.
Imports nothing, so that a command's help can use the wording.
"""

from __future__ import annotations

MIN_TOKENS = 256  # recomputing fewer is about as fast as reading them

# README.md, the banner and `appliance serve --help` use these words; this file's test checks it.
ON_DISK = (
    "only the beginning that a prompt shares with an earlier prompt and its answer, where that is "
    f"{MIN_TOKENS} tokens or longer"
)


def num_on_disk(num_shared_tokens: int, block_size: int) -> int:
    """Return the number of a sequence's leading blocks that may be written.

    Args:
        num_shared_tokens: of its prompt, found in the cache, in host memory or on disk.
        block_size: token slots per block; writes only whole blocks.
    """
    num_blocks = num_shared_tokens // block_size
    return num_blocks if num_blocks * block_size >= MIN_TOKENS else 0
