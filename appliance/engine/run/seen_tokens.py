"""Counts seen tokens for penalties, on the device, which knows them first.

A step counts each row's input token, so a sequence may run on before its last token has reached the
host. Rows of drafts are adjacent and add up; the next step subtracts rejected ones. A window of
tokens is counted anew by the host in every step, without drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels.penalties.rows import IN_PROMPT

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray

    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.device import Device


class SeenTokens:
    """A row of counts per slot; undefined for sequences without penalties.

    Attributes:
        table: (num_slots, vocab_size) int32, as `kernels.penalties.reference` reads it.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self.table = device.zeros((num_slots, vocab_size), "int32")
        self._device = device
        # By place: the sequence, and the number of its tokens counted after all enqueued work. A
        # step repeated after a failure has no more tokens than that, so it recounts.
        self._counted: dict[int, tuple[Sequence, int]] = {}
        self._drafted: dict[int, tuple[int, ...]] = {}  # by place: the drafts counted last

    def prepare(
        self,
        entries: Sequences[ScheduledSequence],
        places: NDArray[np.int32],
        counted: NDArray[np.int32],
    ) -> None:
        """Prepare the counts that a step reads; call it for every enqueued step.

        Args:
            entries: those that sample.
            places: (at least num_entries,) row of each, -1 without penalties.
            counted: same shape; becomes 1 where the step must count the row's input token.
        """
        fresh: dict[int, ScheduledSequence] = {}
        for row in np.flatnonzero(places >= 0).tolist():
            entry, place = entries[row], int(places[row])
            if self._drafted and not entry.drafts:
                self._take_back(place, entry)
            if entry.drafts:
                self._drafted[place] = entry.drafts
            is_known = self._counted.get(place) == (entry.sequence, entry.end - 1)
            if is_known and entry.sequence.request.sampling.penalty_window is None:
                counted[row] = 1
            else:
                fresh[place] = entry
            self._counted[place] = (entry.sequence, entry.end)
        if fresh:
            self._count(fresh)

    def _take_back(self, place: int, entry: ScheduledSequence) -> None:
        """Subtract the last step's drafts that do not precede a row."""
        drafts = self._drafted.pop(place, ())
        sequence, count = self._counted.get(place, (None, 0))
        kept = entry.end - 1 - (count - len(drafts))
        if sequence is not entry.sequence or not 0 <= kept < len(drafts):
            return
        if tuple(entry.sequence.token_ids[count - len(drafts) : entry.end - 1]) != drafts[:kept]:
            return
        for token_id in drafts[kept:]:
            self.table[place, token_id] -= 1
        self._counted[place] = (entry.sequence, entry.end - 1)

    def _count(self, fresh: dict[int, ScheduledSequence]) -> None:
        parts = []
        for place, entry in fresh.items():
            assert not entry.follows, "a token that nobody has counted"
            window = entry.sequence.request.sampling.penalty_window
            begin = 0 if window is None else max(0, entry.end - window)
            tokens = np.array(entry.sequence.token_ids[begin : entry.end])
            num_prompt_tokens = entry.sequence.num_prompt_tokens if window is None else 0
            prompt = np.unique(tokens[:num_prompt_tokens])
            answer, counts = np.unique(tokens[num_prompt_tokens:], return_counts=True)
            ids = np.concatenate((prompt, answer))
            values = np.concatenate((np.full(len(prompt), IN_PROMPT), counts))
            parts.append(np.stack((np.full(len(ids), place), ids, values)))
            self.table[place] = 0
        numbers = self._device.send(np.concatenate(parts, axis=1))
        self.table.index_put_((numbers[0], numbers[1]), numbers[2].int(), accumulate=True)
