"""The scheduler's policy in one place: who is served first, who is admitted, who gives way.

First come, first served within a priority. Change these to change the order of service; the
scheduler guarantees the rest (budget, blocks, that every sequence ends) for any of it, as long as
`rank` is a total order that does not change while a sequence lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from appliance.engine.sequence import Sequence

Rank = tuple[int, float, int]


def rank(sequence: Sequence) -> Rank:
    """Position in the order of service, lowest first; a preempted sequence keeps its own."""
    return (sequence.request.priority, sequence.arrival, sequence.index)


def may_admit(cost: int, num_free_blocks: int, num_promised: int) -> bool:
    """Whether a waiting sequence may start.

    Admission by the first chunk alone would let sequences in that the next step throws out again.

    Args:
        cost: free blocks that all its tokens take, what the prefix cache has left out.
        num_free_blocks: blocks that are free or only cached.
        num_promised: blocks that running sequences still need for their prompts, and one to grow
            into for each that needs none.
    """
    return cost + num_promised <= num_free_blocks


def may_look_ahead(sequence: Sequence) -> bool:
    """Whether a sequence may run on before its latest token is known to the host.

    Penalties are made of the tokens so far, so a request that has them waits for each. Of beams
    nobody knows which go on until all have been heard.
    """
    sampling = sequence.request.sampling
    return not (sampling.has_penalties or sampling.use_beam_search)


def choose_victim(
    running: list[Sequence], beneficiary: Sequence, spared: Collection[Sequence]
) -> Sequence | None:
    """Who gives up its blocks: the one served last, if it ranks behind the beneficiary.

    That the first in rank is never a victim is what rules out livelock.

    Args:
        running: in the order of rank.
        beneficiary: the running sequence that lacks a block.
        spared: sequences that must not be touched now.
    """
    for candidate in reversed(running):
        if candidate is beneficiary:
            return None
        if candidate not in spared:
            return candidate
    return None
