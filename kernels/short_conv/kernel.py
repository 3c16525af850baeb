"""Causal convolution of each channel on the GPU, and the inputs that a sequence keeps for it."""

import triton
import triton.language as tl

from appliance.kernels.device.kept_state import as_kept


@triton.jit
def load_inputs(x_ptr, before_ptr, o_input, mask):
    """Load what filters read, float32: x, or its product with a gate, rounded as x is."""
    b_x = tl.load(x_ptr + o_input, mask=mask, other=0.0)
    if before_ptr is not None:
        b_gate = tl.load(before_ptr + o_input, mask=mask, other=0.0)
        b_x = (b_x.to(tl.float32) * b_gate.to(tl.float32)).to(x_ptr.dtype.element_ty)
    return b_x.to(tl.float32)


@triton.jit
def short_conv_kernel(
    out_ptr,  # (num_tokens, width) float32; with gates of the type of x
    x_ptr,  # (num_tokens, width), rows x_stride apart
    before_ptr,  # (num_tokens, width), rows as those of x, which they multiply; or None
    after_ptr,  # the same, of the result; or None
    filters_ptr,  # (width, TAPS) float32
    bias_ptr,  # (width,) float32, or None
    state_ptr,  # (num_slots, TAPS - 1, width), slots state_stride apart
    first_ptr,  # (num_spans,) int64, the first row of each, first_stride apart
    lens_ptr,  # (num_spans,) int64
    slots_ptr,  # (num_spans,) int64
    goes_on_ptr,  # (num_spans,) bool
    first_stride,
    x_stride,
    state_stride,
    width,
    TAPS: tl.constexpr,
    ACTIVATES: tl.constexpr,  # by silu
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
    o_x = first * x_stride + o_column
    p_state = state_ptr + tl.load(slots_ptr + i_span) * state_stride + o_column
    b_kept = b_mask & (tl.load(goes_on_ptr + i_span) != 0) & (i_block == 0)
    b_total = tl.zeros((BLOCK_T, BLOCK_W), tl.float32)
    for tap in tl.static_range(TAPS):
        o_from = o_row + tap - (TAPS - 1)
        b_own = (o_from >= 0) & (o_row < num_rows)
        o_input = o_x[None, :] + o_from[:, None] * x_stride
        b_x = load_inputs(x_ptr, before_ptr, o_input, b_own[:, None] & b_mask[None, :])
        for place in tl.static_range(tap, TAPS - 1):
            # By the threads that write them below, so that none is overwritten before.
            b_before = tl.load(p_state + place * width, mask=b_kept, other=0.0).to(tl.float32)
            b_x += tl.where((o_row == place - tap)[:, None], b_before[None, :], 0.0)
        b_filter = tl.load(filters_ptr + o_column * TAPS + tap, mask=b_mask, other=0.0)
        # Contracted in every variant, so that no bit depends on how a prompt is cut.
        b_total = tl.fma(b_x, tl.broadcast_to(b_filter[None, :], BLOCK_T, BLOCK_W), b_total)
    if bias_ptr is not None:
        b_total += tl.load(bias_ptr + o_column, mask=b_mask, other=0.0)
    if ACTIVATES:
        b_total *= tl.sigmoid(b_total)
    b_stored = (o_row < num_rows)[:, None] & b_mask[None, :]
    if after_ptr is not None:
        o_gate = o_x[None, :] + o_row[:, None] * x_stride
        b_after = tl.load(after_ptr + o_gate, mask=b_stored, other=0.0).to(tl.float32)
        b_total = b_after * b_total.to(x_ptr.dtype.element_ty).to(tl.float32)
    p_out = out_ptr + (first + o_row)[:, None] * width + o_column[None, :]
    tl.store(p_out, b_total.to(out_ptr.dtype.element_ty), mask=b_stored)
    if i_block == 0:
        for place in tl.static_range(TAPS - 1):
            at = num_rows + place - (TAPS - 1)
            b_row = load_inputs(x_ptr, before_ptr, o_x + at * x_stride, b_mask & (at >= 0))
            b_left = tl.load(
                p_state + (num_rows + place) * width, mask=b_kept & (at < 0), other=0.0
            )
            b_now = as_kept(b_row + b_left.to(tl.float32), state_ptr)
            tl.store(p_state + place * width, b_now, mask=b_mask)
