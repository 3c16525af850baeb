"""Penalties on the CPU: row by row, over seen tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels.penalties.rows import IN_PROMPT

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.penalties.rows import PenaltyRows


def penalize(
    logits: Tensor,
    seen: Tensor,
    rows: PenaltyRows,
    token_ids: Tensor,
    *,
    is_counted: bool = False,
) -> None:
    """See `reference.penalize`; bit-equal to it."""
    table, changed = seen.numpy(), logits.numpy()  # views
    repetitions, presences = rows.repetition.numpy(), rows.presence.numpy()
    frequencies, counted = rows.frequency.numpy(), rows.counted.numpy()
    places, read = rows.places.numpy(), token_ids.numpy()
    asked = np.flatnonzero(places >= 0)
    if is_counted:
        np.subtract.at(table, (places[asked], read[asked]), counted[asked])
    for row in asked.tolist():
        line = table[places[row]]
        line[read[row]] += counted[row]
        found = np.flatnonzero(line)
        values, counts = changed[row, found], line[found]
        repetition = repetitions[row]
        if repetition != 1:
            values = np.where(values > 0, values / repetition, values * repetition)
        presence, frequency = presences[row], frequencies[row]
        if presence or frequency:
            counts = counts % IN_PROMPT
            subtracted = (presence + frequency * counts).astype(np.float32)
            values = np.where(counts > 0, values - subtracted, values)
        changed[row, found] = values
