"""Decides between swapping a preempted sequence to host memory and recomputing it."""

from __future__ import annotations


def should_swap(num_tokens: int, num_bytes: int, *, prefill: float, moves: float) -> bool:
    """Return True if a victim's blocks should go to host memory instead of being recomputed.

    It pays if moving them out and back is faster than computing their tokens. Returns True without
    measurements: the first swap measures.

    Args:
        num_tokens: to recompute.
        num_bytes: of their blocks.
        prefill: tokens per second, 0 if unknown.
        moves: bytes per second in one direction, 0 if unknown.
    """
    if prefill == 0 or moves == 0:
        return True
    return 2 * num_bytes / moves < num_tokens / prefill
