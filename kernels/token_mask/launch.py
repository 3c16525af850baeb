"""Launches token masks on the GPU without waiting: checks and grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.sampling.launch import CHUNK
from appliance.kernels.token_mask.kernel import mask_tokens_kernel

if TYPE_CHECKING:
    from torch import Tensor

NUM_WARPS = 8
_launch_mask_tokens = Launcher(mask_tokens_kernel)


def mask_tokens(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """See `reference.mask_tokens`; each row of the logits is contiguous."""
    num_masks, vocab_size = len(rows), logits.shape[1]
    assert logits.dtype is torch.float32, logits.dtype
    assert rows.dtype is torch.int64, rows.dtype
    assert words.dtype is torch.int32, words.dtype
    assert words.shape[0] == num_masks, (words.shape, num_masks)
    assert words.shape[1] * 32 >= vocab_size, (words.shape, vocab_size)
    assert logits.stride(1) == words.stride(1) == 1, (logits.stride(), words.stride())
    assert rows.is_contiguous()
    if not num_masks:
        return
    with device_of(logits):
        _launch_mask_tokens(
            (num_masks, -(-vocab_size // CHUNK)),
            (
                logits,
                rows,
                words,
                logits.stride(0),
                words.stride(0),
            ),
            {"VOCAB": vocab_size, "CHUNK": CHUNK, "num_warps": NUM_WARPS},
        )
