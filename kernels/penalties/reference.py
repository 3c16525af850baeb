"""Penalties by definition: one dense pass over the rows that have any."""

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
    """Count the tokens read, then lower the logits of tokens seen.

    Args:
        logits: (num_rows, vocab_size) float32; changed in place.
        seen: (num_places, vocab_size) int32, how often each token is in an answer, and `IN_PROMPT`
            on top of that; changed in place. No two rows have the same place.
        rows: settings of each row.
        token_ids: (num_rows,) int64, the token that each row has just read; None counts nothing.
    """
    asked = (rows.places >= 0).nonzero().flatten()
    places = rows.places[asked].long()
    if token_ids is not None:
        seen[places, token_ids[asked]] += rows.counted[asked]
    found = seen[places]
    counts = found % IN_PROMPT
    repetition, presence, frequency = (
        values[asked, None] for values in (rows.repetition, rows.presence, rows.frequency)
    )
    values = logits[asked]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    subtracted = (presence + frequency * counts).float()
    values = torch.where(found > 0, repeated, values)
    logits[asked] = torch.where(counts > 0, values - subtracted, values)
