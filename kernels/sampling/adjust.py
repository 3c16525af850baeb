"""Penalties, bias and bans: a few logits of a few rows are changed in place, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What becomes of which logit, all (num_entries,); no logit stands in two entries."""

    rows: Tensor  # int64
    token_ids: Tensor  # int64
    repetition: Tensor  # float32: divides what is positive, multiplies what is not
    subtracted: Tensor  # float32, after that
    added: Tensor  # float32, last; -inf bans


def adjust(logits: Tensor, adjustments: Adjustments) -> None:
    """Change logits (num_rows, vocab_size) float32 in place."""
    places = (adjustments.rows, adjustments.token_ids)
    values = logits[places]
    values = torch.where(
        values > 0, values / adjustments.repetition, values * adjustments.repetition
    )
    logits[places] = values - adjustments.subtracted + adjustments.added
