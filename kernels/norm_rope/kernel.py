"""Norms on the GPU: one program norms some rows, after adding to the stream if there is one."""

import triton
import triton.language as tl

from appliance.kernels.device.dependent_launch import wait_for_previous


@triton.jit
def normed(b_x, p_weight, p_bias, b_in, eps, DIM: tl.constexpr, CENTERED: tl.constexpr):
    """Return the RMS norm of float32 rows, (rows, dims); with CENTERED, their LayerNorm."""
    if CENTERED:
        b_x = tl.where(b_in[None, :], b_x - (tl.sum(b_x, 1) / DIM)[:, None], 0.0)
    b_factor = tl.rsqrt(tl.sum(b_x * b_x, 1) / DIM + eps)[:, None]
    b_x = b_x * b_factor * tl.load(p_weight, mask=b_in, other=0.0)[None, :]
    if p_bias is not None:
        b_x += tl.load(p_bias, mask=b_in, other=0.0)[None, :]
    return b_x


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    normed_ptr,  # (COUNT, num_rows, DIM); None without a last norm
    total_ptr,  # (num_rows, DIM); None without a stream
    x_ptr,  # (num_rows, DIM), rows x_stride apart
    beside_ptr,  # (num_rows, DIM), added to x first, rows beside_stride apart; or None
    stream_ptr,  # (num_rows, DIM), rows stream_stride apart, or None
    weight_ptr,  # (COUNT, DIM) float32 of the last norms, or None
    bias_ptr,  # (DIM,) float32, or None
    post_ptr,  # (DIM,) float32, of the norm before the stream is added; or None
    x_weight_ptr,  # (DIM,) float32, of a norm of x alone, and of what is beside it; or None
    beside_weight_ptr,
    num_rows,
    x_stride,
    beside_stride,
    stream_stride,
    eps,
    post_eps,
    parts_eps,
    scale,  # of the stream at the end, or None
    CENTERED: tl.constexpr,  # the last norm is a LayerNorm
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    EARLY: tl.constexpr,  # see `dependent_launch`
):
    """Add rows to the stream and norm the sum; each step rounds to the rows' dtype."""
    if EARLY:
        wait_for_previous()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_dim = tl.arange(0, DIM_PADDED)
    b_in = o_dim < DIM
    b_mask = (o_row < num_rows)[:, None] & b_in[None, :]
    b_output = o_row[:, None] * DIM + o_dim[None, :]
    p_x = x_ptr + o_row[:, None] * x_stride + o_dim[None, :]
    b_x = tl.load(p_x, mask=b_mask, other=0.0).to(tl.float32)
    if x_weight_ptr is not None:
        b_x = normed(b_x, x_weight_ptr + o_dim, None, b_in, parts_eps, DIM, False)
        b_x = b_x.to(DTYPE).to(tl.float32)
    if beside_ptr is not None:
        p_beside = beside_ptr + o_row[:, None] * beside_stride + o_dim[None, :]
        b_beside = tl.load(p_beside, mask=b_mask, other=0.0).to(tl.float32)
        if beside_weight_ptr is not None:
            p_weight = beside_weight_ptr + o_dim
            b_beside = normed(b_beside, p_weight, None, b_in, parts_eps, DIM, False)
            b_beside = b_beside.to(DTYPE).to(tl.float32)
        b_x = (b_x + b_beside).to(DTYPE).to(tl.float32)
    if post_ptr is not None:
        b_x = normed(b_x, post_ptr + o_dim, None, b_in, post_eps, DIM, False)
        b_x = b_x.to(DTYPE).to(tl.float32)
    if stream_ptr is not None:
        p_stream = stream_ptr + o_row[:, None] * stream_stride + o_dim[None, :]
        b_x = (b_x + tl.load(p_stream, mask=b_mask, other=0.0).to(tl.float32)).to(DTYPE)
        if scale is not None:
            b_x = (b_x.to(tl.float32) * scale).to(DTYPE)
        tl.store(total_ptr + b_output, b_x, mask=b_mask)
        b_x = b_x.to(tl.float32)
    if normed_ptr is not None:
        for i in tl.static_range(COUNT):
            p_weight = weight_ptr + i * DIM + o_dim
            p_bias = None if bias_ptr is None else bias_ptr + o_dim
            b_normed = normed(b_x, p_weight, p_bias, b_in, eps, DIM, CENTERED).to(DTYPE)
            tl.store(
                normed_ptr + num_rows.to(tl.int64) * (i * DIM) + b_output, b_normed, mask=b_mask
            )
