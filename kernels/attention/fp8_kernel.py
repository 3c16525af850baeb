"""Paged attention on the GPU, prefill over FP8 pages where tensor cores multiply E4M3.

Keys and values go from the page to the tensor cores as they are. A row of queries becomes E4M3
after a multiplication by a power of two, weights after one by 2^8, so both lose three bits more
than `prefill_kernel` does. These tensor cores sum with 13 bits of mantissa on compute
capabilities 8.9 and 9.0 (SageAttention2, arXiv 2411.10958), so no sum is left to them for longer
than a page.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.merge_kernel import beside_sink
from appliance.kernels.attention.tile_kernel import (
    PAGE,
    SMALLEST,
    TANH_LIMIT,
    exp2,
    power_for,
    start,
)
from appliance.kernels.kv_page import layout
from appliance.kernels.kv_page.kernel import as_value_rows, key_dims, permute

# The largest weight is 2^8, of E4M3's 448: what counts beside it is far from its subnormals.
WEIGHT_EXPONENT: tl.constexpr = tl.constexpr(8.0)

_KEY_AXES: tl.constexpr = tl.constexpr(layout.KEYS[8].byte_axes)
_VALUE_AXES: tl.constexpr = tl.constexpr(layout.VALUES[8].byte_axes)


@triton.jit
def load_codes(p_codes, KEYS: tl.constexpr, HEAD_DIM_STORED: tl.constexpr, PADDED: tl.constexpr):
    """Return a page's keys (PADDED, 32) or values (32, PADDED), ordered as in `codes_tile`."""
    o = tl.arange(0, PAGE * PADDED)
    if HEAD_DIM_STORED == PADDED:
        b_codes = tl.load(p_codes + o)
    else:
        b_codes = tl.load(p_codes + o, mask=o < PAGE * HEAD_DIM_STORED, other=0.0)
    b_codes = tl.reshape(b_codes, (PADDED // 32, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
    if KEYS:
        return tl.reshape(permute(b_codes, _KEY_AXES), (PADDED, 32))
    else:
        return tl.reshape(permute(b_codes, _VALUE_AXES), (32, PADDED))


@triton.jit
def attend_codes(
    b_query,  # (BLOCK_M, HEAD_DIM_PADDED) float8e4nv
    b_scale,  # (BLOCK_M,) from products to exponents of 2, or to tanh's argument
    b_position,  # (BLOCK_M,) positions of the rows
    b_last,  # (BLOCK_M,) the last keys that they see
    b_max,  # (BLOCK_M,) float32, running maximum, base 2
    b_sum,  # (BLOCK_M,) float32, of weights times 2^WEIGHT_EXPONENT, as the next
    b_acc,  # (BLOCK_M, HEAD_DIM_PADDED) float32, weighted values
    pages_ptr,
    p_table,
    i_kv_head,
    num_kv_heads,
    key_begin,  # a multiple of PAGE
    key_end,
    cap,
    window,
    PAGE_BYTES: tl.constexpr,
    EDGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Fold the keys and values of some pages into a running softmax.

    A row sees the keys up to its last one, with HAS_WINDOW from the oldest of the `window` up to
    its position; without EDGES every row sees all keys of all pages, and no mask is computed.
    """
    PADDED: tl.constexpr = b_query.shape[1]
    o_n = tl.arange(0, PAGE)
    for key_start in tl.range(key_begin, key_end, PAGE, num_stages=NUM_STAGES):
        i_block = tl.load(p_table + key_start // PAGE).to(tl.int64)
        p_page = pages_ptr + (i_block * num_kv_heads + i_kv_head) * PAGE_BYTES
        b_key = load_codes(p_page, True, HEAD_DIM_STORED, PADDED)
        b_value = load_codes(p_page + PAGE * HEAD_DIM_STORED, False, HEAD_DIM_STORED, PADDED)
        b_score = tl.dot(b_query, b_key)
        if HAS_SOFTCAP:
            b_score = tl.minimum(b_score * b_scale[:, None], TANH_LIMIT)
            b_score = cap * (1.0 - 2.0 / (1.0 + exp2(b_score, "fp8")))
        if EDGES:
            b_key_position = (key_start + o_n)[None, :]
            b_seen = b_key_position <= b_last[:, None]
            if HAS_WINDOW:
                b_seen &= b_key_position > b_position[:, None] - window
            b_score = tl.where(b_seen, b_score, -float("inf"))
        b_largest = tl.max(b_score, 1)
        if HAS_SOFTCAP:
            b_new_max = tl.maximum(b_max, b_largest)
            b_weight = exp2(b_score - (b_new_max - WEIGHT_EXPONENT)[:, None], "fp8")
        else:
            # Scaled in the exponent: product and sum are one instruction.
            b_new_max = tl.maximum(b_max, b_largest * b_scale)
            b_shift = b_new_max - WEIGHT_EXPONENT
            b_weight = exp2(b_score * b_scale[:, None] - b_shift[:, None], "fp8")
        b_decay = exp2(b_max - b_new_max, "fp8")
        b_max = b_new_max
        b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
        # The bound keeps this sum of 32 tokens apart from the running one.
        b_weight = as_value_rows(b_weight.to(tl.float8e4nv))
        b_product = tl.dot(b_weight, b_value, max_num_imprecise_acc=PAGE)
        b_acc = b_acc * b_decay[:, None] + b_product
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["block_tables_stride", "num_kv_heads", "window"])
def fp8_prefill_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    pages_ptr,  # (num_blocks, num_kv_heads, PAGE_BYTES) float8e4nv
    head_scales_ptr,  # (2, num_kv_heads) float32, of keys and values
    sinks_ptr,  # (num_heads,) float32, or None
    tiles_ptr,  # (tiles, 2) int32: sequence, first row among its rows
    sees_ptr,  # (num_tokens,) int32, leading tokens that each row sees; None: those up to its own
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32
    block_tables_ptr,  # (num_seqs, max_blocks) int32
    query_stride,
    block_tables_stride,
    num_kv_heads,
    score_scale,  # from scores to exponents of 2; if capped, to twice the argument of tanh
    cap,  # from tanh to exponents of 2
    window,
    PAGE_BYTES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query rows times padded group
    NUM_STAGES: tl.constexpr,
):
    """Attend from a tile of one sequence's rows to all the keys that they see."""
    ROWS: tl.constexpr = BLOCK_M // GROUP_PADDED
    i_kv_head = tl.program_id(2)
    p_tile = tiles_ptr + tl.program_id(0) * 2
    i_seq = tl.load(p_tile)
    query_start = tl.load(query_start_ptr + i_seq)
    num_rows = tl.load(query_start_ptr + i_seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + i_seq)
    first_row = tl.load(p_tile + 1) + tl.program_id(1) * ROWS
    if first_row >= num_rows:  # the last tile of a sequence may be short
        return
    first_position = context_len - num_rows + first_row
    key_end = tl.minimum(context_len, first_position + ROWS)
    if sees_ptr is not None:  # its last row sees most
        key_end = tl.load(sees_ptr + query_start + tl.minimum(first_row + ROWS, num_rows) - 1)
    key_begin = 0
    if HAS_WINDOW:
        key_begin = tl.maximum(first_position - window + 1, 0) // PAGE * PAGE

    o_m = tl.arange(0, BLOCK_M)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_row = first_row + o_m // GROUP_PADDED
    b_head = i_kv_head * GROUP + o_m % GROUP_PADDED
    b_valid_m = (b_row < num_rows) & (o_m % GROUP_PADDED < GROUP)
    b_query_row = (query_start + b_row).to(tl.int64)
    o_key_dim = key_dims(o_dim)
    p_query = query_ptr + (b_query_row * query_stride + b_head * HEAD_DIM)[:, None]
    b_query = tl.load(
        p_query + o_key_dim[None, :],
        mask=b_valid_m[:, None] & (o_key_dim < HEAD_DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    b_factor = power_for(tl.max(tl.abs(b_query), 1)) * 0.5  # from 2^7 up to 2^8
    b_query = (b_query * b_factor[:, None]).to(tl.float8e4nv)
    scale = score_scale * tl.load(head_scales_ptr + i_kv_head)
    b_scale = tl.maximum(scale / b_factor, SMALLEST)
    b_position = first_position + o_m // GROUP_PADDED
    b_last = b_position
    if sees_ptr is not None:
        b_last = tl.load(sees_ptr + query_start + b_row, mask=b_row < num_rows, other=0) - 1
    b_max, b_sum, b_acc = start(BLOCK_M, HEAD_DIM_PADDED)
    # All rows see the whole pages that the first row sees. A window leaves few full pages.
    full_end = key_begin
    p_table = block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride
    if not HAS_WINDOW:
        first_end = first_position + 1
        if sees_ptr is not None:
            first_end = tl.load(sees_ptr + query_start + first_row)
        full_end = tl.minimum(first_end // PAGE * PAGE, key_end)
        b_max, b_sum, b_acc = attend_codes(
            b_query,
            b_scale,
            b_position,
            b_last,
            b_max,
            b_sum,
            b_acc,
            pages_ptr,
            p_table,
            i_kv_head,
            num_kv_heads,
            key_begin,
            full_end,
            cap,
            window,
            PAGE_BYTES,
            False,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HEAD_DIM_STORED,
            NUM_STAGES,
        )
    b_max, b_sum, b_acc = attend_codes(
        b_query,
        b_scale,
        b_position,
        b_last,
        b_max,
        b_sum,
        b_acc,
        pages_ptr,
        p_table,
        i_kv_head,
        num_kv_heads,
        full_end,
        key_end,
        cap,
        window,
        PAGE_BYTES,
        True,
        HAS_WINDOW,
        HAS_SOFTCAP,
        HEAD_DIM_STORED,
        NUM_STAGES,
    )
    b_acc *= tl.load(head_scales_ptr + num_kv_heads + i_kv_head)
    b_output = b_acc * (1.0 / tl.where(b_sum > 0.0, b_sum, 1.0))[:, None]
    # Read anew: where the rows go to takes no registers until here.
    query_start = tl.load(query_start_ptr + i_seq, volatile=True)
    num_rows = tl.load(query_start_ptr + i_seq + 1, volatile=True) - query_start
    b_row = first_row + o_m // GROUP_PADDED
    b_head = i_kv_head * GROUP + o_m % GROUP_PADDED
    b_valid_m = (b_row < num_rows) & (o_m % GROUP_PADDED < GROUP)
    if HAS_SINKS:
        b_lse = b_max - WEIGHT_EXPONENT + tl.log2(tl.maximum(b_sum, SMALLEST))
        b_sink = tl.load(sinks_ptr + b_head, mask=b_valid_m, other=0.0)
        b_output *= beside_sink(b_lse, b_sink)[:, None]
    b_output_row = (query_start + b_row).to(tl.int64) * (num_kv_heads * GROUP) + b_head
    tl.store(
        output_ptr + b_output_row[:, None] * HEAD_DIM + o_dim[None, :],
        b_output.to(output_ptr.dtype.element_ty),
        mask=b_valid_m[:, None] & (o_dim < HEAD_DIM)[None, :],
    )
