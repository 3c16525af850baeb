"""What may lie on the disk: the rule, and the words in which people are told of it everywhere.

A conversation that ended, a question that was asked once and a load test repeat nothing, so they
leave nothing. Imports nothing, so that a command's help can have the words.
"""

from __future__ import annotations

MIN_TOKENS = 256  # fewer are computed again about as fast as they are read

# README.md, the banner and `appliance serve --help` have these words, see the test of this file.
ON_DISK = (
    "only the beginning that a prompt shares with an earlier prompt and its answer, where that is "
    f"{MIN_TOKENS} tokens or longer"
)


def num_on_disk(num_shared_tokens: int, block_size: int) -> int:
    """Leading blocks of a sequence that may be written.

    Args:
        num_shared_tokens: of its prompt, found in the cache, in host memory or on the disk.
        block_size: token slots of a block; blocks are written whole.
    """
    num_blocks = num_shared_tokens // block_size
    return num_blocks if num_blocks * block_size >= MIN_TOKENS else 0
