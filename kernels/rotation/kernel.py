"""Rotation of inputs on the GPU: a program rotates some blocks of one row."""

import triton
import triton.language as tl

from appliance.kernels.device.dependent_launch import wait_for_previous
from appliance.kernels.device.hadamard import hadamard


@triton.jit
def rotate_kernel(
    out_ptr,  # (num_tokens, in_features)
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    in_features,
    x_stride,
    NEGATIVE: tl.constexpr,  # a bit for each input of a block
    SIZE: tl.constexpr,  # of a block
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,  # see `dependent_launch`
):
    if EARLY:
        wait_for_previous()
    i_row = tl.program_id(0).to(tl.int64)
    o_in = tl.arange(0, SIZE)
    b_at = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[:, None] * SIZE + o_in[None, :]
    b_mask = b_at < in_features
    b_x = tl.load(x_ptr + i_row * x_stride + b_at, mask=b_mask, other=0.0).to(tl.float32)
    b_negative = (tl.full((SIZE,), NEGATIVE, tl.int64) >> o_in) & 1
    b_rotated = hadamard(tl.where((b_negative == 1)[None, :], -b_x, b_x), SIZE)
    b_rotated = b_rotated.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i_row * in_features + b_at, b_rotated, mask=b_mask)
