"""Changes single logits for a request: bias, bans, the end of a thought."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.nouns.plan import ScheduledSequence
    from appliance.engine.run.device import Device


@dataclass(slots=True)
class AdjustmentList:
    """Collects the changes to a step's logits.

    Attributes:
        banned: rows with banned tokens.
    """

    eos_token_ids: tuple[int, ...]
    rows: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    banned: list[int] = field(default_factory=list)

    def add(self, row: int, entry: ScheduledSequence, *, is_over: bool = False) -> None:
        """Add a sequence's changes to its row; does not ban end tokens if `is_over`."""
        sampling = entry.sequence.request.sampling
        num_output_tokens = entry.end - entry.sequence.num_prompt_tokens
        output: list[int] = []
        if sampling.thought_budget is not None:
            output = entry.sequence.token_ids[entry.sequence.num_prompt_tokens :]
            output += entry.drafts
        added = sampling.bias_at(num_output_tokens, output)
        if num_output_tokens < sampling.min_tokens and not is_over:
            banned = dict.fromkeys((*self.eos_token_ids, *sampling.stop_token_ids), -np.inf)
            if banned:
                self.banned.append(row)
                added = added | banned
        self.rows += [row] * len(added)
        self.token_ids += added
        self.values += added.values()

    def apply(self, logits: Tensor, device: Device) -> None:
        """Change logits (num_rows, vocab_size) float32 in place; no logit has two entries."""
        if not self.rows:
            return
        numbers = np.array((self.rows, self.token_ids, self.values), dtype=np.float64)
        sent = device.send(numbers)
        rows, token_ids = (sent[part].long() for part in range(2))
        logits[rows, token_ids] += sent[2].float()
