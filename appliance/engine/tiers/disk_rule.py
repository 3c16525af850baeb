"""The rule of what may be written to disk, and its wording for users.

A finished conversation, a one-time question and a load test repeat nothing, so they leave nothing.
Imports nothing, so that a command's help can use the wording.
"""

from __future__ import annotations

MIN_TOKENS = 256  # fewer are recomputed about as fast as they are read

# README.md, the banner and `appliance serve --help` use these words; this file's test checks it.
ON_DISK = (
    "only the beginning that a prompt shares with an earlier prompt and its answer, where that is "
    f"{MIN_TOKENS} tokens or longer"
)


def num_on_disk(num_shared_tokens: int, block_size: int) -> int:
    """Return how many leading blocks of a sequence may be written.

    Args:
        num_shared_tokens: of its prompt, found in the cache, in host memory or on disk.
        block_size: token slots per block; blocks are written whole.
    """
    num_blocks = num_shared_tokens // block_size
    return num_blocks if num_blocks * block_size >= MIN_TOKENS else 0
