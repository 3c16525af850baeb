"""Results of reading a prompt: sent to its client, or summed until they are complete.

Imports no torch.
"""

from __future__ import annotations

from array import array
from operator import add
from typing import TYPE_CHECKING

from appliance.engine.plan import Update

if TYPE_CHECKING:
    from appliance.engine.plan import Sampled, ScheduledSequence
    from appliance.engine.sequence import Sequence


def take_read(entry: ScheduledSequence, result: Sampled, updates: list[Update]) -> None:
    """Record that the rows of an entry were read.

    Args:
        entry: of a plan that was run; some of its rows are to be read.
        result: that came of it.
        updates: what clients are told, to which this adds.
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
