"""Finds the likeliest tokens of each row, with a fixed order among equals.

`torch.topk` leaves that order open: it changes with the device and with the count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.kernels import arrays

if TYPE_CHECKING:
    from torch import Tensor

_LOW = 0xFFFFFFFF


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores of each row, falling, equal ones by rising token id.

    Args:
        scores: (num_rows, vocab_size) float32.
        count: per row, at most the size of the vocabulary.

    Returns:
        (num_rows, count) float32 scores, and int64 token ids.
    """
    if isinstance(scores, np.ndarray):
        return _likeliest_on_host(scores, count)
    import torch

    # A float's bits order like an integer's once those of negative floats are inverted. Adding zero
    # turns -0.0 into 0.0.
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


def _likeliest_on_host(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do the same without torch: sort by falling score, then by id."""
    values = scores.numpy() + np.float32(0)
    last = values.shape[-1] - 1
    bits = values.view(np.int32)
    keys = (((bits >> 31) & 0x7FFFFFFF) ^ bits).astype(np.int64) << 32
    keys |= np.arange(last, -1, -1)
    best = np.partition(keys, -count, axis=-1)[:, -count:] if count else keys[:, :0]
    token_ids = last - (np.sort(best, axis=-1)[:, ::-1] & _LOW)
    found = arrays.of_numpy(np.take_along_axis(scores.numpy(), token_ids, axis=-1))
    return found, arrays.of_numpy(np.ascontiguousarray(token_ids))
