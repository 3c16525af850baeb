"""Penalties on the CPU: row by row, over seen tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.penalties.rows import IN_PROMPT

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.penalties.rows import PenaltyRows


def penalize(
    logits: Tensor, seen: Tensor, rows: PenaltyRows, token_ids: Tensor | None = None
) -> None:
    """See `reference.penalize`, to the last bit."""
    for row, place in enumerate(rows.places.tolist()):
        if place < 0:
            continue
        line = seen[place]
        if token_ids is not None:
            line[token_ids[row]] += rows.counted[row]
        found = line.nonzero().flatten()
        values, counts = logits[row, found], line[found]
        repetition = rows.repetition[row]
        if repetition != 1:
            values = torch.where(values > 0, values / repetition, values * repetition)
        presence, frequency = rows.presence[row], rows.frequency[row]
        if presence or frequency:
            counts = counts % IN_PROMPT
            subtracted = (presence + frequency * counts).float()
            values = torch.where(counts > 0, values - subtracted, values)
        logits[row, found] = values
