"""The gated delta rule on the GPU: a program keeps a part of one head's state in registers."""

import triton
import triton.language as tl


@triton.jit
def unit(b_x, EPSILON: tl.constexpr):
    """Scale a vector to length 1."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) + EPSILON)


@triton.jit
def gated_delta_kernel(
    out_ptr,  # (num_tokens, num_value_heads, VALUE_DIM) float32
    query_ptr,  # (num_tokens, key heads, KEY_DIM) float32, rows query_stride apart
    key_ptr,
    value_ptr,  # (num_tokens, num_value_heads, VALUE_DIM) float32
    decay_ptr,  # (num_tokens, num_value_heads) float32, logarithms
    beta_ptr,  # the same
    state_ptr,  # (num_slots, num_value_heads, KEY_DIM, VALUE_DIM) float32
    first_ptr,  # (num_spans,) int64, the first row of each, first_stride apart
    lens_ptr,  # (num_spans,) int64
    slots_ptr,  # (num_spans,) int64
    goes_on_ptr,  # (num_spans,) bool
    first_stride,
    query_stride,
    key_stride,
    value_stride,
    num_value_heads,
    scale,  # of queries
    SHARED: tl.constexpr,  # value heads of one key head
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """Run the rows of one sequence one after another, for some values of one head."""
    i_span, i_head = tl.program_id(0), tl.program_id(1)
    o_key = tl.arange(0, KEY_PADDED)
    o_value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    b_key_mask, b_value_mask = o_key < KEY_DIM, o_value < VALUE_DIM
    b_mask = b_key_mask[:, None] & b_value_mask[None, :]
    i_state = tl.load(slots_ptr + i_span) * num_value_heads + i_head
    p_state = state_ptr + i_state * (KEY_DIM * VALUE_DIM)
    p_state = p_state + o_key[:, None] * VALUE_DIM + o_value[None, :]
    goes_on = tl.load(goes_on_ptr + i_span) != 0
    b_state = tl.load(p_state, mask=b_mask & goes_on, other=0.0)
    first = tl.load(first_ptr + i_span * first_stride)
    num_rows = tl.load(lens_ptr + i_span)
    i_key_head = i_head // SHARED
    for i in tl.range(0, num_rows, num_stages=1):
        i_row = first + i
        p_query = query_ptr + i_row * query_stride + i_key_head * KEY_DIM
        p_key = key_ptr + i_row * key_stride + i_key_head * KEY_DIM
        b_query = unit(tl.load(p_query + o_key, mask=b_key_mask, other=0.0), EPSILON) * scale
        b_key = unit(tl.load(p_key + o_key, mask=b_key_mask, other=0.0), EPSILON)
        p_value = value_ptr + i_row * value_stride + i_head * VALUE_DIM
        b_value = tl.load(p_value + o_value, mask=b_value_mask, other=0.0)
        i_share = i_row * num_value_heads + i_head
        b_state *= tl.exp(tl.load(decay_ptr + i_share))
        b_error = b_value - tl.sum(b_key[:, None] * b_state, 0)
        b_state += b_key[:, None] * (b_error * tl.load(beta_ptr + i_share))[None, :]
        p_out = out_ptr + i_share * VALUE_DIM + o_value
        tl.store(p_out, tl.sum(b_query[:, None] * b_state, 0), mask=b_value_mask)
    tl.store(p_state, b_state, mask=b_mask)
