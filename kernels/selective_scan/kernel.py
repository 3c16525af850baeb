"""The selective scan on the GPU: a program keeps a part of one head's state in registers."""

import triton
import triton.language as tl


@triton.jit
def selective_scan_kernel(
    out_ptr,  # (num_tokens, num_heads, HEAD_DIM) float32
    value_ptr,  # (num_tokens, num_heads, HEAD_DIM) float32, rows value_stride apart
    key_ptr,  # (num_tokens, groups, STATE_DIM) float32
    query_ptr,
    size_ptr,  # (num_tokens, num_heads) float32
    rates_ptr,  # (num_heads,) float32
    state_ptr,  # (num_slots, num_heads, STATE_DIM, HEAD_DIM) float32
    first_ptr,  # (num_spans,) int64, the first row of each, first_stride apart
    lens_ptr,  # (num_spans,) int64
    slots_ptr,  # (num_spans,) int64
    goes_on_ptr,  # (num_spans,) bool
    first_stride,
    value_stride,
    key_stride,
    query_stride,
    num_heads,
    SHARED: tl.constexpr,  # heads of one group
    STATE_DIM: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Run the rows of one sequence one after another, for some values of one head."""
    i_span, i_head = tl.program_id(0), tl.program_id(1)
    o_state = tl.arange(0, STATE_PADDED)
    o_value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    b_state_mask, b_value_mask = o_state < STATE_DIM, o_value < HEAD_DIM
    b_mask = b_state_mask[:, None] & b_value_mask[None, :]
    i_held = tl.load(slots_ptr + i_span) * num_heads + i_head
    p_held = state_ptr + i_held * (STATE_DIM * HEAD_DIM)
    p_held = p_held + o_state[:, None] * HEAD_DIM + o_value[None, :]
    goes_on = tl.load(goes_on_ptr + i_span) != 0
    b_held = tl.load(p_held, mask=b_mask & goes_on, other=0.0)
    first = tl.load(first_ptr + i_span * first_stride)
    num_rows = tl.load(lens_ptr + i_span)
    rate = tl.load(rates_ptr + i_head)
    i_group = i_head // SHARED
    for i in tl.range(0, num_rows, num_stages=1):
        i_row = first + i
        p_key = key_ptr + i_row * key_stride + i_group * STATE_DIM
        p_query = query_ptr + i_row * query_stride + i_group * STATE_DIM
        b_key = tl.load(p_key + o_state, mask=b_state_mask, other=0.0)
        b_query = tl.load(p_query + o_state, mask=b_state_mask, other=0.0)
        p_value = value_ptr + i_row * value_stride + i_head * HEAD_DIM
        b_value = tl.load(p_value + o_value, mask=b_value_mask, other=0.0)
        i_size = i_row * num_heads + i_head
        size = tl.load(size_ptr + i_size)
        b_held = b_held * tl.exp(-rate * size) + b_key[:, None] * (b_value * size)[None, :]
        p_out = out_ptr + i_size * HEAD_DIM + o_value
        tl.store(p_out, tl.sum(b_query[:, None] * b_held, 0), mask=b_value_mask)
    tl.store(p_held, b_held, mask=b_mask)
