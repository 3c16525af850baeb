"""RMS norm on the GPU: one program norms some rows, after adding the residual if there is one."""

import triton
import triton.language as tl

from appliance.kernels.device.dependent_launch import wait_for_previous


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    normed_ptr,  # (num_rows, DIM)
    total_ptr,  # (num_rows, DIM), may be the residual itself; None without a residual
    x_ptr,  # (num_rows, DIM), rows x_stride apart
    residual_ptr,  # (num_rows, DIM), rows residual_stride apart, or None
    weight_ptr,  # (DIM,) float32
    num_rows,
    x_stride,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EARLY: tl.constexpr,  # see `dependent_launch`
):
    if EARLY:
        wait_for_previous()
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dim = tl.arange(0, DIM_PADDED)
    b_mask = (o_row < num_rows)[:, None] & (o_dim < DIM)[None, :]
    b_output = o_row[:, None] * DIM + o_dim[None, :]
    b_x = tl.load(x_ptr + o_row[:, None] * x_stride + o_dim[None, :], mask=b_mask, other=0.0)
    b_wide = b_x.to(tl.float32)
    if HAS_RESIDUAL:
        p_residual = residual_ptr + o_row[:, None] * residual_stride + o_dim[None, :]
        b_wide += tl.load(p_residual, mask=b_mask, other=0.0).to(tl.float32)
        # The norm sees the sum rounded to its dtype, as the next layer does.
        b_total = b_wide.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + b_output, b_total, mask=b_mask)
        b_wide = b_total.to(tl.float32)
    b_mean_square = tl.sum(b_wide * b_wide, 1) / DIM
    b_factor = tl.rsqrt(b_mean_square + eps)[:, None]
    b_weight = tl.load(weight_ptr + o_dim, mask=o_dim < DIM, other=0.0)[None, :]
    b_normed = b_wide * b_factor * b_weight
    tl.store(normed_ptr + b_output, b_normed.to(normed_ptr.dtype.element_ty), mask=b_mask)
