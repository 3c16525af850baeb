"""The scheduler's policy in one place: who is served first, who is admitted, who gives way.

Change these functions and figures to change the order of service; the scheduler guarantees the
rest (budget, blocks, that every sequence ends) for any of it, as long as `rank` is a total order
that does not change while a sequence lives. Whether a victim's blocks are kept or computed again
is a rule of the tiers, see `tiers/swap_rule.py`. The order in which things are decided in a step:

1. Every running answer gets its row.
2. What is left of the step goes to prompts, those that run already and those that wait: the
   whole budget if no answer runs, else as many rows as `step_budget` allows (`DECODE_SLOWDOWN`).
   Prompts that fit into one step all together get it at once, if the last such step is long ago
   (`may_stall`): a rare gap between two tokens is felt less than a late answer.
3. Among prompts the better priority goes first. Within a priority the owners (API keys) take
   turns of a few rows: next is whoever had fewest tokens so far (`turn`). What counts is what was
   computed for an owner: prompt tokens that the cache had not, and generated ones.
4. An owner's turn goes to its running prompts in rank, then to its waiting requests: the one with
   the longest cached prefix, unless one that came earlier was overtaken often (`choose_waiting`).
5. Where blocks run out, the worst priority gives way first, within it the owner who holds most
   running sequences, and of these the latest (`choose_victim`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from collections.abc import Sequence as Ordered

    from appliance.engine.scheduling.fairness import Account
    from appliance.engine.sequence import Sequence

DECODE_SLOWDOWN = 1.6  # a step with prompts takes this many times what its answers alone would
STALL_STEPS = 64  # for each that is as long as it likes
MAX_STALLS = 2  # of those, saved up: the short prompts of a burst take no more of them
MIN_PROMPT_ROWS = 8  # of a step, however slow they are: prompts never stand still
MAX_OVERTAKEN = 8  # sequences that may start before one that came earlier
WINDOW = 8  # an owner's earliest waiting sequences, among which the longest prefix is looked for
TURNS = 16  # parts of a step's prompt rows that owners take in turn

Rank = tuple[int, float, int]


def rank(sequence: Sequence) -> Rank:
    """Position in the order of service, lowest first; a preempted sequence keeps its own."""
    return (sequence.request.priority, sequence.arrival, sequence.index)


def turn(priority: int, account: Account) -> tuple[int, int, int]:
    """Whose turn it is among owners that have prompts, lowest first: deficit round robin.

    `served` grows with every token computed for an owner, so who is furthest behind goes next,
    and no two that always want more drift apart by more than one request and one step.

    Args:
        priority: the best of the owner's prompts.
        account: the owner's.
    """
    return (priority, account.served, account.num_running)


def may_stall(wanted: int, budget: int) -> bool:
    """Whether prompts are short enough to hold running answers up for a step that was saved up.

    Args:
        wanted: rows of all prompts that run or could start, from their beginning.
        budget: rows that are left of the step.
    """
    return wanted <= MAX_STALLS * budget


def choose_waiting(earliest: Ordered[Sequence], num_cached: Callable[[Sequence], int]) -> Sequence:
    """Which of an owner's waiting sequences starts next.

    First those that ran before and were preempted, then those that were overtaken too often, then
    by the length of the prefix that is in the cache; who came first goes before its equals.

    Args:
        earliest: some that came first, in the order of rank.
        num_cached: tokens of a sequence that are in the cache.
    """
    if len(earliest) == 1 or earliest[0].first_scheduled is not None:
        return earliest[0]
    for sequence in earliest:
        if sequence.first_scheduled is not None:
            return sequence
    for sequence in earliest:
        if sequence.num_overtaken >= MAX_OVERTAKEN:
            return sequence
    return max(earliest, key=num_cached)


def may_overtake(sequence: Sequence, blocked: Iterable[Sequence]) -> bool:
    """Whether a waiting sequence may start in a step in which others found no room.

    Args:
        sequence: of another owner than those.
        blocked: whose turn it was, and for whom there were too few blocks.
    """
    return all(
        sequence.request.priority <= other.request.priority and other.num_overtaken < MAX_OVERTAKEN
        for other in blocked
    )


def may_admit(cost: int, num_free_blocks: int, num_promised: int) -> bool:
    """Whether a waiting sequence may start.

    Admission by the first chunk alone would let sequences in that the next step throws out again.

    Args:
        cost: free blocks that all its tokens take, what the prefix cache has left out.
        num_free_blocks: blocks that are free or only cached.
        num_promised: blocks that running sequences still need for their prompts, and for each one
            more to grow into.
    """
    return cost + num_promised <= num_free_blocks


def may_look_ahead(sequence: Sequence) -> bool:
    """Whether a sequence may run on before its latest token is known to the host.

    Of beams nobody knows which go on until all have been heard, and what a grammar allows next
    depends on the latest token.
    """
    sampling = sequence.request.sampling
    return not sampling.use_beam_search and sampling.grammar is None


def choose_victim(
    running: list[Sequence], beneficiary: Sequence, in_flight: Collection[Sequence]
) -> Sequence | None:
    """Who gives up its blocks: of those that rank behind the beneficiary, see the list above.

    That the first in rank is never a victim is what rules out livelock: it ends, and then the
    next one is first.

    Args:
        running: in the order of rank.
        beneficiary: the running sequence that lacks a block.
        in_flight: sequences that must not be touched now, nor those of their units.
    """
    candidates: list[Sequence] = []
    for sequence in reversed(running):
        if sequence is beneficiary:
            break
        if sequence in in_flight or _is_bound(sequence, beneficiary, in_flight):
            continue
        if candidates and sequence.request.priority < candidates[0].request.priority:
            break
        candidates.append(sequence)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    held = Counter(sequence.request.owner for sequence in running)
    return max(candidates, key=lambda candidate: held[candidate.request.owner])


def _is_bound(sequence: Sequence, beneficiary: Sequence, in_flight: Collection[Sequence]) -> bool:
    """Whether a sequence would take one with it that is to keep its blocks."""
    unit = sequence.group.unit(sequence)
    return len(unit) > 1 and any(one is beneficiary or one in in_flight for one in unit)
