"""Counts seen tokens for penalties, on the device, which knows them first.

A step counts the token that a row reads, so a sequence may run on before its latest token has
reached the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from appliance.kernels.penalties.rows import IN_PROMPT

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray

    from appliance.engine.plan import ScheduledSequence
    from appliance.engine.run.device import Device
    from appliance.engine.sequence import Sequence


class SeenTokens:
    """A row of counts per slot; rows of sequences without penalties are undefined.

    Attributes:
        table: (num_slots, vocab_size) int32, as `kernels.penalties.reference` reads it.
    """

    def __init__(self, device: Device, num_slots: int, vocab_size: int) -> None:
        self.table = torch.zeros(
            (num_slots, vocab_size), dtype=torch.int32, device=device.torch_device
        )
        self._device = device
        # By place: the sequence, and the number of its tokens counted once everything enqueued is
        # done. A step repeated after a failure has no more tokens than that, so it is counted
        # afresh.
        self._counted: dict[int, tuple[Sequence, int]] = {}

    def prepare(
        self,
        entries: Sequences[ScheduledSequence],
        places: NDArray[np.int32],
        counted: NDArray[np.int32],
    ) -> None:
        """Prepare the counts a step will read; call it for every enqueued step.

        Args:
            entries: those that sample.
            places: (at least num_entries,) row of each, -1 without penalties.
            counted: same shape, gets 1 where the step has to count the token that the row reads.
        """
        fresh: dict[int, ScheduledSequence] = {}
        for row in np.flatnonzero(places >= 0).tolist():
            entry, place = entries[row], int(places[row])
            if self._counted.get(place) == (entry.sequence, entry.end - 1):
                counted[row] = 1
            else:
                fresh[place] = entry
            self._counted[place] = (entry.sequence, entry.end)
        if fresh:
            self._count(fresh)

    def _count(self, fresh: dict[int, ScheduledSequence]) -> None:
        parts = []
        for place, entry in fresh.items():
            assert not entry.follows, "a token that nobody has counted"
            tokens = np.array(entry.sequence.token_ids[: entry.end])
            num_prompt_tokens = entry.sequence.num_prompt_tokens
            prompt = np.unique(tokens[:num_prompt_tokens])
            answer, counts = np.unique(tokens[num_prompt_tokens:], return_counts=True)
            ids = np.concatenate((prompt, answer))
            values = np.concatenate((np.full(len(prompt), IN_PROMPT), counts))
            parts.append(np.stack((np.full(len(ids), place), ids, values)))
            self.table[place].zero_()
        numbers = self._device.send(torch.from_numpy(np.concatenate(parts, axis=1)))
        self.table.index_put_((numbers[0], numbers[1]), numbers[2].int(), accumulate=True)
