"""The rule of which block boundaries get a state checkpoint. Imports no torch.

A model with recurrent layers can only go on where a copy of its state is, and a step leaves one
behind its last row alone. So prompts are cut where later prompts are likely to part from them:

1. at their last block boundary: the next turn, siblings and the same prompt again begin there;
2. where the cached blocks of earlier prompts ended: there this one parts from them;
3. at distances from the end that double, so that a changed tail of any length makes the engine
   compute at most about twice that many tokens, and a long prompt has few checkpoints.

An answer gets one at each block boundary, which costs no cut; each replaces the one before, so the
last one is the end of the turn. Beams fork and end too often for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.plan import ScheduledSequence
    from appliance.engine.sequence import Sequence

FIRST_DISTANCE = 512  # tokens: fewer rows would make steps that use a GPU badly


def chunk_end(sequence: Sequence, start: int, end: int, block_size: int) -> int:
    """Return where rows that could be [start, end) end, so that no checkpoint is passed."""
    places = _places(sequence, block_size)
    return min((place for place in places if start < place < end), default=end)


def gets_checkpoint(entry: ScheduledSequence, block_size: int) -> bool:
    """Return True if a checkpoint should follow the last row of an entry."""
    sequence, end = entry.sequence, entry.end
    if end % block_size:
        return False
    if entry.samples and entry.num_tokens == 1 and entry.start >= sequence.num_prompt_tokens:
        return not sequence.request.sampling.use_beam_search
    return end in _places(sequence, block_size)


def _places(sequence: Sequence, block_size: int) -> set[int]:
    """Return the numbers of a sequence's tokens behind which rows of a prompt are cut."""
    num_tokens = len(sequence.token_ids)
    found = {num_tokens, num_tokens - 1, sequence.num_alike}
    distance = FIRST_DISTANCE
    while distance < num_tokens:
        found.add(num_tokens - distance)
        distance *= 2
    return {place // block_size * block_size for place in found}
