"""Token masks on the CPU: one pass over the logits of the rows that have one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See `reference.mask_tokens`."""
    vocab_size = logits.shape[1]
    values = logits.numpy()
    for row, mask in zip(rows.tolist(), words.numpy(), strict=True):
        banned = np.unpackbits(~mask.view(np.uint8), count=vocab_size, bitorder="little")
        np.putmask(values[row], banned.view(np.bool_), -np.inf)
