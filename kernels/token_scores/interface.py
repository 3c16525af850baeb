"""The interface of scoring tokens, on any device, and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TokenScores(NamedTuple):
    """Natural log probabilities; NaN in a row whose logits are not finite."""

    chosen: Tensor  # (num_rows,) float32, of the given token
    top: Tensor  # (num_rows, count) float32, of the likeliest, in falling order
    top_ids: Tensor  # (num_rows, count) int64; among equals the lowest id comes first


class ScoreTokens(Protocol):
    """Scores a token per row without waiting for the device, in C or torch."""

    def __call__(self, logits: Tensor, targets: Tensor, count: int) -> TokenScores:
        """Score tokens.

        Args:
            logits: (num_rows, vocab_size) float32; not changed.
            targets: (num_rows,) int64, a token for each row.
            count: likeliest tokens to report; 0 reports none.
        """
        ...
