"""Token masks by definition: bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Ban the tokens whose bit is 0 in some rows.

    Args:
        logits: (num_rows, vocab_size) float32; changed in place.
        rows: (num_masks,) int64, the row of each mask; no two have the same.
        words: (num_masks, at least vocab_size / 32) int32. Bit i of word w, from the lowest, is
            that of token 32 * w + i.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    bits = words[:, token_ids // 32] >> (token_ids % 32).int() & 1
    logits[rows] = torch.where(bits == 1, logits[rows], -torch.inf)
