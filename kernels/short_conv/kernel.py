"""Causal convolution of each channel on the GPU, and the inputs that a sequence keeps for it."""

import triton
import triton.language as tl


@triton.jit
def short_conv_kernel(
    out_ptr,  # (num_tokens, width) float32
    x_ptr,  # (num_tokens, width), rows x_stride apart
    filters_ptr,  # (width, TAPS) float32
    bias_ptr,  # (width,) float32, or None
    state_ptr,  # (num_slots, TAPS - 1, width) float32, slots state_stride apart
    first_ptr,  # (num_spans,) int64, the first row of each, first_stride apart
    lens_ptr,  # (num_spans,) int64
    slots_ptr,  # (num_spans,) int64
    goes_on_ptr,  # (num_spans,) bool
    first_stride,
    x_stride,
    state_stride,
    width,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Convolve some rows of one sequence in some channels; the first block of rows keeps inputs."""
    i_span, i_block = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(lens_ptr + i_span)
    start = i_block * BLOCK_T
    if start >= num_rows:
        return
    o_column = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    b_mask = o_column < width
    o_row = start + tl.arange(0, BLOCK_T)
    first = tl.load(first_ptr + i_span * first_stride)
    p_x = x_ptr + first * x_stride + o_column
    p_state = state_ptr + tl.load(slots_ptr + i_span) * state_stride + o_column
    b_kept = b_mask & (tl.load(goes_on_ptr + i_span) != 0) & (i_block == 0)
    b_total = tl.zeros((BLOCK_T, BLOCK_W), tl.float32)
    for tap in tl.static_range(TAPS):
        o_from = o_row + tap - (TAPS - 1)
        b_own = (o_from >= 0) & (o_row < num_rows)
        p_from = p_x[None, :] + o_from[:, None] * x_stride
        b_x = tl.load(p_from, mask=b_own[:, None] & b_mask[None, :], other=0.0).to(tl.float32)
        for place in tl.static_range(tap, TAPS - 1):
            # By the threads that write them below, so that none is overwritten before.
            b_before = tl.load(p_state + place * width, mask=b_kept, other=0.0)
            b_x += tl.where((o_row == place - tap)[:, None], b_before[None, :], 0.0)
        b_filter = tl.load(filters_ptr + o_column * TAPS + tap, mask=b_mask, other=0.0)
        # Contracted in every variant, so that no bit depends on how a prompt is cut.
        b_total = tl.fma(b_x, tl.broadcast_to(b_filter[None, :], BLOCK_T, BLOCK_W), b_total)
    if bias_ptr is not None:
        b_total += tl.load(bias_ptr + o_column, mask=b_mask, other=0.0)
    p_out = out_ptr + (first + o_row)[:, None] * width + o_column[None, :]
    tl.store(p_out, b_total, mask=(o_row < num_rows)[:, None] & b_mask[None, :])
    if i_block == 0:
        for place in tl.static_range(TAPS - 1):
            at = num_rows + place - (TAPS - 1)
            b_row = tl.load(p_x + at * x_stride, mask=b_mask & (at >= 0), other=0.0)
            b_before = tl.load(
                p_state + (num_rows + place) * width, mask=b_kept & (at < 0), other=0.0
            )
            tl.store(p_state + place * width, b_row.to(tl.float32) + b_before, mask=b_mask)
