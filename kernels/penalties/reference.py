"""Penalties by definition: one dense pass over the rows that have any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
    """Count the tokens read, and lower the logits of tokens seen up to each row.

    Args:
        logits: (num_rows, vocab_size) float32; changed in place.
        seen: (num_places, vocab_size) int32, how often each token is in an answer, and `IN_PROMPT`
            on top of that; changed in place.
        rows: settings of each row. Rows of the same place are adjacent, in the order of their
            tokens.
        token_ids: (num_rows,) int64, the token that each row has just read.
        is_counted: `seen` has all rows' tokens; otherwise it gets them.
    """
    asked = (rows.places >= 0).nonzero().flatten()
    places, read, counted = rows.places[asked].long(), token_ids[asked], rows.counted[asked]
    if not is_counted:
        seen.index_put_((places, read), counted, accumulate=True)
    found = seen[places]
    # Of a place's later rows, whose tokens a row does not see.
    row, later = ((places[:, None] == places).triu(1)).nonzero(as_tuple=True)
    found.index_put_((row, read[later]), -counted[later], accumulate=True)
    counts = found % IN_PROMPT
    repetition, presence, frequency = (
        values[asked, None] for values in (rows.repetition, rows.presence, rows.frequency)
    )
    values = logits[asked]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    subtracted = (presence + frequency * counts).float()
    values = torch.where(found > 0, repeated, values)
    logits[asked] = torch.where(counts > 0, values - subtracted, values)
