"""The likeliest tokens of each row, with a fixed order among equals.

`torch.topk` leaves that open: its choice changes with the device and with how many are asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores of each row, highest first, and of equals the lowest token id first.

    Args:
        scores: (num_rows, vocab_size) float32.
        count: of a row; no more than there are tokens.

    Returns:
        (num_rows, count) float32 scores, and int64 token ids.
    """
    # A float's bits are ordered as an integer's once those of negative ones are turned around.
    # Adding zero makes -0.0 what it is equal to.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits >> 31
    ordered &= 0x7FFFFFFF
    ordered ^= bits
    last = scores.shape[-1] - 1
    keys = ordered.to(torch.int64)
    keys <<= 32
    keys |= torch.arange(last, -1, -1, device=scores.device)
    best = keys.topk(count).values
    token_ids = last - (best & _LOW)
    return scores.gather(-1, token_ids), token_ids
