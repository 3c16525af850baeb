"""Which logits a request changes before a token is chosen: penalties, bias and bans."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from appliance.kernels.sampling.adjust import Adjustments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from appliance.engine.device.device import Device
    from appliance.engine.sequence import Sequence


@dataclass(slots=True)
class AdjustmentList:
    """Collects the entries of a step's rows."""

    eos_token_ids: tuple[int, ...]
    rows: list[NDArray[np.int64]] = field(default_factory=list)
    token_ids: list[NDArray[np.int64]] = field(default_factory=list)
    numbers: list[NDArray[np.float32]] = field(default_factory=list)  # (3, entries) each
    changed: list[int] = field(default_factory=list)  # rows with an entry

    def add(self, row: int, sequence: Sequence, num_output_tokens: int) -> None:
        """Add what a sequence asks for.

        Args:
            row: of its logits.
            sequence: with all its tokens, if it has penalties.
            num_output_tokens: those that are not known to the host yet included.
        """
        sampling = sequence.request.sampling
        has_ban = num_output_tokens < sampling.min_tokens
        bias = sampling.bias_at(num_output_tokens)
        if not (sampling.has_penalties or bias or has_ban):
            return
        repetition: dict[int, float] = {}
        subtracted: dict[int, float] = {}
        added: dict[int, float] = dict(bias)
        if sampling.repetition_penalty != 1.0:
            repetition = dict.fromkeys(sequence.token_ids, sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            ids, counts = np.unique(
                np.array(sequence.token_ids[sequence.num_prompt_tokens :], dtype=np.int64),
                return_counts=True,
            )
            penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
            subtracted = dict(zip(ids.tolist(), penalties.tolist(), strict=True))
        if has_ban:
            added |= dict.fromkeys((*self.eos_token_ids, *sampling.stop_token_ids), -np.inf)
        changed = list({**repetition, **subtracted, **added})
        if not changed:
            return
        self.changed.append(row)
        self.rows.append(np.full(len(changed), row, dtype=np.int64))
        self.token_ids.append(np.array(changed, dtype=np.int64))
        self.numbers.append(
            np.array(
                [
                    [repetition.get(token_id, 1.0) for token_id in changed],
                    [subtracted.get(token_id, 0.0) for token_id in changed],
                    [added.get(token_id, 0.0) for token_id in changed],
                ],
                dtype=np.float32,
            )
        )

    def send(self, device: Device) -> Adjustments:
        """All entries on the device; there must be some."""
        places = np.stack((np.concatenate(self.rows), np.concatenate(self.token_ids)))
        rows, token_ids = device.send(torch.from_numpy(places)).unbind()
        numbers = device.send(torch.from_numpy(np.concatenate(self.numbers, axis=1)))
        return Adjustments(rows, token_ids, *numbers.unbind())
