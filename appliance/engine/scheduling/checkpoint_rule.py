"""Chooses the block boundaries that get a state checkpoint. Imports no torch.

A model with recurrent layers can continue only from a copy of its state, and a step leaves one only
after its last row. So prompts are cut where later prompts are likely to diverge:

1. at their last block boundary: the next turn, siblings and the same prompt begin there; 2. where
the cached blocks of earlier prompts ended, because this one diverges there; 3. at doubling
distances from the end: after a change of the tail the engine computes at most about
   twice the changed tokens, and a long prompt has few checkpoints.

An answer gets one at each block boundary without a cut; each replaces the previous one, so the last
is at the end of the turn. Beams fork and end too often for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence

FIRST_DISTANCE = 512  # tokens: steps with fewer rows use a GPU badly


def chunk_end(sequence: Sequence, start: int, end: int, block_size: int) -> int:
    """Return the end of the rows [start, end), cut at the first checkpoint."""
    places = _places(sequence, block_size)
    return min((place for place in places if start < place < end), default=end)


def gets_checkpoint(entry: ScheduledSequence, block_size: int) -> bool:
    """Return True if a checkpoint follows an entry's last row."""
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
