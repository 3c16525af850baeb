"""Launches penalties on the GPU without waiting: checks and grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.penalties.kernel import penalize_kernel
from appliance.kernels.sampling.launch import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.penalties.rows import PenaltyRows

NUM_WARPS = 8
_launch_penalize = Launcher(penalize_kernel)


def penalize(
    logits: Tensor,
    seen: Tensor,
    rows: PenaltyRows,
    token_ids: Tensor,
    *,
    is_counted: bool = False,
) -> None:
    """See `reference.penalize`; each row of the logits is contiguous."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype is torch.float32, logits.dtype
    assert seen.dtype is torch.int32, seen.dtype
    assert seen.shape[1] == vocab_size, (seen.shape, logits.shape)
    assert seen.is_contiguous()
    assert logits.stride(1) == 1, logits.stride()
    for values, dtype in (
        (rows.places, torch.int32),
        (rows.counted, torch.int32),
        (rows.repetition, torch.float32),
        (rows.presence, torch.float64),
        (rows.frequency, torch.float64),
        (token_ids, torch.int64),
    ):
        assert values.shape == (num_rows,), (values.shape, num_rows)
        assert values.is_contiguous()
        assert values.dtype is dtype, values.dtype
    if not num_rows:
        return
    with device_of(logits):
        _launch_penalize(
            (num_rows, -(-vocab_size // CHUNK)),
            (
                logits,
                seen,
                rows.places,
                rows.counted,
                token_ids,
                rows.repetition,
                rows.presence,
                rows.frequency,
                logits.stride(0),
                num_rows,
            ),
            {
                "VOCAB": vocab_size,
                "CHUNK": CHUNK,
                "COUNTS": not is_counted,
                "num_warps": NUM_WARPS,
                "enable_fp_fusion": False,  # to round as the reference does
            },
        )
