"""Penalties on the CPU: row by row, over seen tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels.penalties.rows import IN_PROMPT

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.penalties.rows import PenaltyRows


def penalize(
    logits: Tensor, seen: Tensor, rows: PenaltyRows, token_ids: Tensor | None = None
) -> None:
    """See `reference.penalize`; bit-equal to it."""
    table, changed = seen.numpy(), logits.numpy()  # views
    repetitions, presences = rows.repetition.numpy(), rows.presence.numpy()
    frequencies, counted = rows.frequency.numpy(), rows.counted.numpy()
    for row, place in enumerate(rows.places.tolist()):
        if place < 0:
            continue
        line = table[place]
        if token_ids is not None:
            line[int(token_ids[row])] += counted[row]
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
