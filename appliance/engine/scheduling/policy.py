"""The scheduler's policy: the order of service, admission, preemption.

Change these functions and figures to change the order of service. The scheduler guarantees the rest
(budget, blocks, that every sequence ends) as long as `rank` is a total order that does not change
while a sequence lives. `tiers.should_swap` decides between keeping and recomputing a victim's
blocks. The order of decisions in a step:

1. Every running answer gets its row, and rows for drafts of its next tokens as long as only
   answers run (`most_drafts`); `speculation/controller.py` decides how many.
2. The rest of the step goes to prompts, running and waiting: the whole budget if no answer
   runs, else as many rows as `step_budget` allows (`DECODE_SLOWDOWN`). Prompts that all fit into
   one step get it at once, if the last such step is long ago (`may_stall`): users notice a rare
   gap between tokens less than a late answer.
3. Among prompts the better priority goes first. Within a priority the owners (API keys) take
   turns of a few rows: next is the owner with fewest tokens so far (`turn`). Tokens computed for
   an owner count: prompt tokens that were not cached, and generated ones.
4. An owner's turns go to its running prompts by rank, then to its waiting requests: the one
   with the longest cached prefix, unless an earlier one was overtaken often (`choose_waiting`).
   Every second turn goes to its prompt with the least left to read, running or waiting, if that is
   much less than what the first has left (`may_pass`): a short question does not wait for a long
   document, which still gets half of the rows.
5. When blocks run out, it preempts the worst priority first, within it the owner with most
   running sequences, and of these the latest (`choose_victim`).

Prompts of a model with recurrent layers are cut where their state gets a checkpoint (`chunk_end`).
Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from collections.abc import Sequence as Ordered

    from appliance.engine.nouns.limits import Bounds
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence


DECODE_SLOWDOWN = 1.6  # a step with prompts may take this many times what its answers alone would
STALL_STEPS = 64  # steps between two of any length
MAX_STALLS = 2  # unused such steps to save up; a burst of short prompts takes no more
MIN_PROMPT_ROWS = 8  # per step, even if slow: prompts never stand still
MAX_OVERTAKEN = 8  # later sequences that may start before an earlier one
WINDOW = 8  # an owner's earliest waiting sequences to search for the longest cached prefix
MUCH_SHORTER = 4  # times less to read lets a prompt pass the first one
TURNS = 16  # shares of a step's prompt rows, in turns

MAX_DRAFTS = 15  # per sequence and step: attention reads up to 16 of its rows together
MAX_ANSWER_ROWS = 1 + MAX_DRAFTS  # more known tokens are read like a prompt
FIRST_DISTANCE = 512  # tokens to a checkpoint: steps with fewer rows use a GPU badly

Rank = tuple[int, float, int]


def rank(sequence: Sequence) -> Rank:
    """Return the position in the order of service, lowest first; preemption keeps it."""
    return (sequence.request.priority, sequence.arrival, sequence.index)


def turn(priority: int, served: int, num_running: int) -> tuple[int, int, int]:
    """Rank owners with prompts, lowest first: deficit round robin.

    `served` grows with every token computed for an owner, so the one furthest behind goes next. Two
    owners that always want more differ by at most one request and one step.
    """
    return (priority, served, num_running)


def may_stall(wanted: int, budget: int) -> bool:
    """Return True if prompts are short enough to stall running answers for a saved-up step.

    `wanted` counts all rows of running and startable prompts, from their beginning.
    """
    return wanted <= MAX_STALLS * budget


def choose_waiting(earliest: Ordered[Sequence], num_cached: Callable[[Sequence], int]) -> Sequence:
    """Choose an owner's next waiting sequence to start.

    Preempted ones come first, then those overtaken too often, then those with the longest cached
    prefix; ties go to the earliest.
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


def may_pass(num_left: int, num_left_of_first: int) -> bool:
    """Return True if a prompt may be read beside an earlier one of its owner.

    Equally long prompts are read one after the other: all at once, each would end last.

    Args:
        num_left: tokens that it has left to read, without cached ones.
        num_left_of_first: the same of the owner's first running prompt.
    """
    return num_left * MUCH_SHORTER <= num_left_of_first


def may_overtake(sequence: Sequence, blocked: Iterable[Sequence]) -> bool:
    """Return True if a waiting sequence may start although other owners' found too few blocks."""
    return all(
        sequence.request.priority <= other.request.priority and other.num_overtaken < MAX_OVERTAKEN
        for other in blocked
    )


def may_admit(cost: int, num_free_blocks: int, num_promised: int) -> bool:
    """Return True if a waiting sequence may start.

    Admission by the first chunk alone would admit sequences that the next step preempts again.

    Args:
        cost: free blocks for all its tokens outside the prefix cache.
        num_free_blocks: free or only cached blocks.
        num_promised: blocks that running sequences still need for their prompts, plus one each to
            grow into.
    """
    return cost + num_promised <= num_free_blocks


def may_look_ahead(sequence: Sequence) -> bool:
    """Return True if a sequence may run on before its last token has reached the host.

    Beams depend on all results of a step, a grammar's next tokens on the last one, and a window of
    penalties is counted on the host.
    """
    sampling = sequence.request.sampling
    return not (
        sampling.use_beam_search
        or sampling.grammar is not None
        or sampling.penalty_window is not None
    )


def is_answer(sequence: Sequence, num_left: int) -> bool:
    """Return True if a sequence's rows continue its answer instead of reading known tokens."""
    return 0 < num_left <= MAX_ANSWER_ROWS and sequence.num_computed >= sequence.num_prompt_tokens


def may_draft(num_prompts: int, num_startable: int) -> bool:
    """Return True if a step may hold drafts: only if no prompt needs the rows.

    Args:
        num_prompts: running sequences that read a prompt.
        num_startable: waiting sequences, if more may run.
    """
    return not (num_prompts or num_startable)


def most_drafts(
    sequence: Sequence, num_left: int, bounds: Bounds, *, is_ahead: bool = False
) -> int:
    """Return the maximum number of drafts for a running answer in a step.

    None for beams, which depend on all results of a step, nor with a window of penalties, which
    moves with each token. Each draft may become a token, and one
    more follows. With recurrent layers no draft reaches a block's end: there the answer leaves a
    checkpoint, which a step does only after its last row.

    Args:
        num_left: its own rows in this step.
        is_ahead: a step in flight samples the token before them.
    """
    num_tokens = len(sequence.token_ids) + is_ahead
    computed = len(sequence.token_ids) if is_ahead else sequence.num_computed
    sampling = sequence.request.sampling
    if sampling.use_beam_search or sampling.penalty_window is not None:
        return 0
    if computed + num_left < num_tokens:
        return 0
    room = min(bounds.max_tokens, sequence.max_tokens) - num_tokens
    most = min(room - 1, MAX_DRAFTS, MAX_ANSWER_ROWS - num_left)
    if bounds.is_recurrent:
        most = min(most, -num_tokens % bounds.block_size - 1)
    return max(0, most)


def choose_victim(
    running: list[Sequence], beneficiary: Sequence, in_flight: Collection[Sequence]
) -> Sequence | None:
    """Choose the sequence to preempt, ranked after the beneficiary.

    The first in rank is never a victim, which rules out livelock: it ends, and then the next one is
    first.

    Args:
        running: in rank order.
        beneficiary: the running sequence that lacks a block.
        in_flight: sequences that must not be preempted now, nor members of their units.
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
    """Return True if preempting a sequence would preempt one that must keep its blocks."""
    unit = sequence.group.unit(sequence)
    return len(unit) > 1 and any(one is beneficiary or one in in_flight for one in unit)


def uncut(sequence: Sequence, start: int, end: int) -> int:
    """Return an end of the rows [start, end) that lies inside no picture.

    Rows of a picture that see each other run in one step. One that would be cut waits for the next
    step if there are rows before it, else all of it runs, also beyond `end`.
    """
    pictures = sequence.request.pictures
    for span in () if pictures is None else pictures.spans:
        if span.start < end < span.stop:
            return span.start if span.start > start else span.stop
    return end


def chunk_end(sequence: Sequence, start: int, end: int, block_size: int) -> int:
    """Return the end of the rows [start, end), cut at the first checkpoint.

    A model with recurrent layers can continue only from a copy of its state, and a step leaves one
    only after its last row. So prompts are cut where later prompts are likely to diverge:

    1. at their last block boundary: the next turn, siblings and the same prompt begin there;
    2. where the cached blocks of earlier prompts ended, because this one diverges there;
    3. at doubling distances from the end: after a change of the tail the engine computes at most
       about twice the changed tokens, and a long prompt has few checkpoints.
    """
    places = _places(sequence, block_size)
    return min((place for place in places if start < place < end), default=end)


def gets_checkpoint(entry: ScheduledSequence, block_size: int) -> bool:
    """Return True if a checkpoint follows an entry's last row.

    An answer gets one at each block boundary without a cut; each replaces the previous one, so the
    last is at the end of the turn. Beams fork and end too often for that.
    """
    sequence, end = entry.sequence, entry.end
    if end % block_size:
        return False
    if entry.samples and entry.num_tokens == 1 and entry.start >= sequence.num_prompt_tokens:
        return not sequence.request.sampling.use_beam_search
    return end in _places(sequence, block_size)


def _places(sequence: Sequence, block_size: int) -> set[int]:
    """Return the numbers of tokens after which a prompt is cut."""
    num_tokens = len(sequence.token_ids)
    found = {num_tokens, num_tokens - 1, sequence.num_alike}
    distance = FIRST_DISTANCE
    while distance < num_tokens:
        found.add(num_tokens - distance)
        distance *= 2
    return {place // block_size * block_size for place in found}
