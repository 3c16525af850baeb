"""Decides whether a preempted sequence is swapped to host memory or recomputed."""

from __future__ import annotations


def should_swap(num_tokens: int, num_bytes: int, *, prefill: float, moves: float) -> bool:
    """Return True if a victim's blocks should go to host memory instead of being recomputed.

    It pays if moving them out and back takes less time than computing their tokens. Without
    measurements it returns True: the first swap measures.

    Args:
        num_tokens: to be recomputed.
        num_bytes: of their blocks.
        prefill: tokens per second, 0 if unknown.
        moves: bytes per second in one direction, 0 if unknown.
    """
    if prefill == 0 or moves == 0:
        return True
    return 2 * num_bytes / moves < num_tokens / prefill
