"""Whether a preempted sequence comes back from host memory or is computed again."""

from __future__ import annotations


def should_swap(num_tokens: int, num_bytes: int, *, prefill: float, moves: float) -> bool:
    """Whether a victim's blocks go to host memory rather than being computed again.

    It pays if out and back again takes less time than computing its tokens. What was never
    measured is tried: after the first time it is known.

    Args:
        num_tokens: that would be computed again.
        num_bytes: of the blocks that hold them.
        prefill: tokens per second, 0 if unknown.
        moves: bytes per second in one direction, 0 if unknown.
    """
    if prefill == 0 or moves == 0:
        return True
    return 2 * num_bytes / moves < num_tokens / prefill
