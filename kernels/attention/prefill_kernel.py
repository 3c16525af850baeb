"""Paged attention on the GPU, prefill: programs take tiles of a sequence's rows.

`tile_kernel` folds the pages; decode, with few rows, is `decode_kernel`.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.merge_kernel import beside_sink
from appliance.kernels.attention.tile_kernel import SMALLEST, attend, power_for, start
from appliance.kernels.kv_page.kernel import key_dims


@triton.jit(
    do_not_specialize=["block_tables_stride", "open_tables_stride", "num_kv_heads", "window"]
)
def prefill_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    pages_ptr,  # as in `decode_kernel`, and so on
    head_scales_ptr,
    halves_ptr,
    open_pages_ptr,
    sealed_lens_ptr,
    open_tables_ptr,
    open_tables_stride,
    sinks_ptr,
    tiles_ptr,  # (tiles, 2) int32: sequence, first row among its rows
    sees_ptr,  # (num_tokens,) int32, leading tokens that each row sees; None: those up to its own
    query_start_ptr,
    context_lens_ptr,
    block_tables_ptr,
    query_stride,
    block_tables_stride,
    num_kv_heads,
    score_scale,
    cap,
    window,
    CODES: tl.constexpr,
    ASM: tl.constexpr,
    COMPUTE: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    OPEN_ELEMENTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    FP8_FACTOR: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query rows times padded group
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend from a tile of one sequence's rows to all the keys that they see."""
    PRECISION: tl.constexpr = "tf32x3" if COMPUTE == "fp32" else None
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
    window_end = 0
    if HAS_WINDOW:
        window_end = first_position + ROWS - window
        key_begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N

    o_m = tl.arange(0, BLOCK_M)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_row = first_row + o_m // GROUP_PADDED
    b_head = i_kv_head * GROUP + o_m % GROUP_PADDED
    b_valid_m = (b_row < num_rows) & (o_m % GROUP_PADDED < GROUP)
    b_query_row = (query_start + b_row).to(tl.int64)
    o_key_dim = o_dim
    if CODES != "none":
        o_key_dim = key_dims(o_dim)
    p_query = query_ptr + (b_query_row * query_stride + b_head * HEAD_DIM)[:, None]
    b_query = tl.load(
        p_query + o_key_dim[None, :],
        mask=b_valid_m[:, None] & (o_key_dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    scale = score_scale
    if CODES == "fp8":
        scale *= FP8_FACTOR * tl.load(head_scales_ptr + i_kv_head)
    row_scale = scale
    if CODES != "none":
        b_factor = power_for(tl.max(tl.abs(b_query.to(tl.float32)), 1))
        b_query = b_query.to(tl.float32) * b_factor[:, None]
        row_scale = tl.maximum(scale / b_factor, SMALLEST)
    b_query = b_query.to(tl.dtype(COMPUTE))
    b_query_sum = tl.sum(b_query.to(tl.float32), 1)
    b_position = first_position + o_m // GROUP_PADDED
    b_last = b_position
    if sees_ptr is not None:
        b_last = tl.load(sees_ptr + query_start + b_row, mask=b_row < num_rows, other=0) - 1
    b_max, b_sum, b_acc = start(BLOCK_M, HEAD_DIM_PADDED)
    # All rows see the whole tiles of keys that the first row sees, and all keys in sealed pages.
    first_end = first_position + 1
    if sees_ptr is not None:
        first_end = tl.load(sees_ptr + query_start + first_row)
    full_end = tl.minimum(first_end // BLOCK_N * BLOCK_N, key_end)
    if CODES == "sealed":
        sealed_len = tl.load(sealed_lens_ptr + i_seq)
        full_end = tl.minimum(sealed_len, key_end)
    p_table = block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride
    if CODES != "sealed" and (HAS_WINDOW or COMPUTE == "fp32"):
        # One loop masks every tile: a window leaves few full ones, and a test in each iteration
        # whether it is costs warps their own rows; for float32 registers are few.
        full_end = key_begin
    else:
        b_max, b_sum, b_acc = attend(
            b_query,
            b_query_sum,
            row_scale,
            b_position,
            b_last,
            b_max,
            b_sum,
            b_acc,
            pages_ptr,
            p_table,
            0,
            halves_ptr,
            i_kv_head,
            num_kv_heads,
            key_begin,
            full_end,
            cap,
            window,
            window_end,
            CODES,
            ASM,
            PAGE_ELEMENTS,
            PRECISION,
            False,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HEAD_DIM,
            HEAD_DIM_STORED,
            PARTS,
            BLOCK_N,
            NUM_STAGES,
        )
    # What is left are the keys among the rows, or an open block.
    p_tail = pages_ptr
    tail_table = 0
    if CODES == "sealed":
        p_tail = open_pages_ptr
        p_table = open_tables_ptr + i_seq.to(tl.int64) * open_tables_stride
        tail_table = sealed_len
    tail_begin = tl.maximum(key_begin, full_end)
    if tail_begin < key_end:
        b_max, b_sum, b_acc = attend(
            b_query,
            b_query_sum,
            row_scale,
            b_position,
            b_last,
            b_max,
            b_sum,
            b_acc,
            p_tail,
            p_table,
            tail_table,
            None,
            i_kv_head,
            num_kv_heads,
            tail_begin,
            key_end,
            cap,
            window,
            window_end,
            "int8" if CODES == "sealed" else CODES,
            ASM,
            OPEN_ELEMENTS if CODES == "sealed" else PAGE_ELEMENTS,
            PRECISION,
            True,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HEAD_DIM,
            HEAD_DIM_STORED,
            PARTS,
            BLOCK_N,
            NUM_STAGES,
        )
    if CODES == "fp8":
        b_acc *= FP8_FACTOR * tl.load(head_scales_ptr + num_kv_heads + i_kv_head)
    b_output = b_acc * (1.0 / tl.where(b_sum > 0.0, b_sum, 1.0))[:, None]
    # Read anew: where the rows go to takes no registers until here.
    query_start = tl.load(query_start_ptr + i_seq, volatile=True)
    num_rows = tl.load(query_start_ptr + i_seq + 1, volatile=True) - query_start
    b_row = first_row + o_m // GROUP_PADDED
    b_head = i_kv_head * GROUP + o_m % GROUP_PADDED
    b_valid_m = (b_row < num_rows) & (o_m % GROUP_PADDED < GROUP)
    if HAS_SINKS:
        b_lse = b_max + tl.log2(tl.maximum(b_sum, SMALLEST))
        b_sink = tl.load(sinks_ptr + b_head, mask=b_valid_m, other=0.0)
        b_output *= beside_sink(b_lse, b_sink)[:, None]
    b_output_row = (query_start + b_row).to(tl.int64) * (num_kv_heads * GROUP) + b_head
    tl.store(
        output_ptr + b_output_row[:, None] * HEAD_DIM + o_dim[None, :],
        b_output.to(output_ptr.dtype.element_ty),
        mask=b_valid_m[:, None] & (o_dim < HEAD_DIM)[None, :],
    )
