"""The gated norm on the GPU: a program norms some neighbours of one row."""

import triton
import triton.language as tl

from appliance.kernels.device.dependent_launch import wait_for_previous


@triton.jit
def gated_norm_kernel(
    out_ptr,  # (num_tokens, dim)
    x_ptr,  # (num_tokens, dim) float32
    gate_ptr,  # (num_tokens, dim), rows gate_stride apart
    weight_ptr,  # (WIDTH,) float32; with WEIGHTS (dim,)
    value_ptr,  # (num_tokens, dim) float32, rows value_stride apart, added by factors; or None
    factor_ptr,  # (dim / HEAD_DIM,) float32, or None
    dim,
    gate_stride,
    value_stride,
    eps,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,  # neighbours with one factor
    WEIGHTS: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,  # groups of neighbours
    EARLY: tl.constexpr,  # see `dependent_launch`
):
    if EARLY:
        wait_for_previous()
    i_row = tl.program_id(0).to(tl.int64)
    o_in = tl.arange(0, WIDTH_PADDED)
    b_start = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)) * WIDTH
    b_at = b_start[:, None] + o_in[None, :]
    b_mask = (b_start < dim)[:, None] & (o_in < WIDTH)[None, :]
    b_x = tl.load(x_ptr + i_row * dim + b_at, mask=b_mask, other=0.0)
    if value_ptr is not None:
        b_value = tl.load(value_ptr + i_row * value_stride + b_at, mask=b_mask, other=0.0)
        b_x += b_value * tl.load(factor_ptr + b_at // HEAD_DIM, mask=b_mask, other=0.0)
    b_gate = tl.load(gate_ptr + i_row * gate_stride + b_at, mask=b_mask, other=0.0).to(tl.float32)
    b_gate = b_gate * tl.sigmoid(b_gate)
    if GATES_FIRST:
        b_x *= b_gate
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / WIDTH + eps)[:, None]
    if WEIGHTS:
        b_x *= tl.load(weight_ptr + b_at, mask=b_mask, other=0.0)
    else:
        b_x *= tl.load(weight_ptr + o_in, mask=o_in < WIDTH, other=0.0)[None, :]
    if not GATES_FIRST:
        b_x *= b_gate
    tl.store(out_ptr + i_row * dim + b_at, b_x.to(out_ptr.dtype.element_ty), mask=b_mask)
