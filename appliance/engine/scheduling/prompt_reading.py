"""Results of reading a prompt: passed on to the client, or summed until complete.

Imports no torch.
"""

from __future__ import annotations

from array import array
from operator import add
from typing import TYPE_CHECKING

from appliance.engine.nouns.plan import Update

if TYPE_CHECKING:
    from appliance.engine.nouns.plan import Sampled, ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence


def take_read(entry: ScheduledSequence, result: Sampled, updates: list[Update]) -> None:
    """Record that an entry's rows were read.

    Args:
        entry: of an executed plan, with rows to read.
        updates: receives the client's updates.
    """
    sequence = entry.sequence
    sequence.num_read = entry.read.stop
    if result.pooled is None:
        updates.append(Update(sequence, prompt_logprobs=result.scores))
        return
    before = sequence.pooled
    pooled = result.pooled if before is None else array("d", map(add, before, result.pooled))
    sequence.pooled = pooled
    if sequence.num_read == sequence.to_read.stop:
        updates.append(Update(sequence, pooled=_mean(sequence, pooled)))


def _mean(sequence: Sequence, pooled: array[float]) -> bytes:
    return array("f", [value / len(sequence.to_read) for value in pooled]).tobytes()
