"""The soft cap of logits by definition, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap).

    Args:
        logits: (num_rows, vocab_size), any float dtype.
        cap: the bound of all logits.

    Returns:
        Same shape, float32.
    """
    return cap * torch.tanh(logits.float() / cap)
