"""Paged attention on the GPU: decode, whose programs share out spans of keys, and prefill.

The spans come from `attention_spans`, what both do with pages is `attention_tile`.
"""

import triton
import triton.language as tl

from appliance.kernels.attention_spans.kernel import cut
from appliance.kernels.attention_tile.kernel import (
    LOWEST,
    attend,
    finish,
    load_group,
    power_for,
    start,
)
from appliance.kernels.kv_page.kernel import key_dims

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# A changing width of the block tables must not compile the kernel anew in the middle of serving.
@triton.jit(
    do_not_specialize=["block_tables_stride", "open_tables_stride", "num_kv_heads", "window"]
)
def decode_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    partial_ptr,  # (capacity, num_heads, head_dim) float32
    partial_lse_ptr,  # (capacity, num_heads) float32, base 2
    arrived_ptr,  # (num_seqs, num_kv_heads) int32, zeros before and after
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    pages_ptr,  # (num_blocks, num_kv_heads, page) elements, or words of 4 bytes if quantized
    head_scales_ptr,  # (2, num_kv_heads) float32, of keys and values; "fp8" only
    halves_ptr,  # the pages as float16; this and the next four with "sealed" only
    open_pages_ptr,  # (num_open, num_kv_heads, page) int32: pages of 8 bits
    sealed_lens_ptr,  # (num_seqs,) int32, leading tokens that lie in sealed pages
    open_tables_ptr,  # (num_seqs, max_open) int32, the pages of those after them
    open_tables_stride,
    sinks_ptr,  # (num_heads,) float32, or None
    spans_ptr,  # (capacity, 4) int32
    num_spans_ptr,  # (1,) int32
    context_lens_ptr,  # (num_seqs,) int32
    block_tables_ptr,  # (num_seqs, max_blocks) int32
    query_stride,
    block_tables_stride,
    num_kv_heads,
    score_scale,  # from scores to exponents of 2; if capped, to twice the argument of tanh
    cap,  # from tanh to exponents of 2
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    FP8_FACTOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_SPAN: tl.constexpr,
    LONG_SPAN: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Programs take (span, KV head) pairs in turn; the last to finish a row's spans merges them."""
    PRECISION: tl.constexpr = "tf32x3" if COMPUTE == "fp32" else None
    o_m = tl.arange(0, BLOCK_M)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_valid_m = o_m < GROUP
    b_mask = b_valid_m[:, None] & (o_dim < HEAD_DIM)[None, :]
    num_heads = num_kv_heads * GROUP
    num_items = tl.load(num_spans_ptr) * num_kv_heads

    for i_item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        i_kv_head = i_item % num_kv_heads
        p_span = spans_ptr + (i_item // num_kv_heads) * 4
        i_seq = tl.load(p_span)
        key_begin = tl.load(p_span + 1)
        key_end = tl.load(p_span + 2)
        i_partial = tl.load(p_span + 3)
        context_len = tl.load(context_lens_ptr + i_seq)
        count, span = cut(context_len, MIN_SPAN, LONG_SPAN, MAX_SPANS)
        first_partial = i_partial - key_begin // span
        lowest_key = 0
        if HAS_WINDOW:
            # Tiles of keys stand at multiples of their size, so that a row's sum is made of the
            # same parts in every step.
            lowest_key = tl.maximum(context_len - window, 0)
            key_begin = tl.maximum(key_begin, lowest_key // BLOCK_N * BLOCK_N)
        b_head = i_kv_head * GROUP + o_m
        p_query = query_ptr + i_seq.to(tl.int64) * query_stride + i_kv_head * GROUP * HEAD_DIM
        b_query, undo = load_group(p_query, COMPUTE, CODES, GROUP, HEAD_DIM, HEAD_DIM_PADDED)
        b_query_sum = tl.sum(b_query.to(tl.float32), 1)
        scale = score_scale * undo
        if CODES == "fp8":
            scale *= FP8_FACTOR * tl.load(head_scales_ptr + i_kv_head)
        b_max, b_sum, b_acc = start(BLOCK_M, HEAD_DIM_PADDED)
        closed_end = key_end
        if CODES == "sealed":
            sealed_len = tl.load(sealed_lens_ptr + i_seq)
            closed_end = tl.minimum(key_end, sealed_len)
        b_max, b_sum, b_acc = attend(
            b_query,
            b_query_sum,
            None,
            None,
            b_max,
            b_sum,
            b_acc,
            pages_ptr,
            block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride,
            0,
            halves_ptr,
            i_kv_head,
            num_kv_heads,
            key_begin,
            closed_end,
            lowest_key,
            scale,
            cap,
            window,
            CODES,
            ASM,
            PAGE_ELEMENTS,
            PRECISION,
            False,
            False,
            HAS_WINDOW,
            HAS_SOFTCAP,
            HEAD_DIM,
            HEAD_DIM_STORED,
            BLOCK_N,
            NUM_STAGES,
        )
        if CODES == "sealed":
            b_max, b_sum, b_acc = attend(
                b_query,
                b_query_sum,
                None,
                None,
                b_max,
                b_sum,
                b_acc,
                open_pages_ptr,
                open_tables_ptr + i_seq.to(tl.int64) * open_tables_stride,
                sealed_len,
                None,
                i_kv_head,
                num_kv_heads,
                tl.maximum(key_begin, sealed_len),
                key_end,
                lowest_key,
                scale,
                cap,
                window,
                "int8",
                ASM,
                OPEN_ELEMENTS,
                PRECISION,
                False,
                False,
                HAS_WINDOW,
                HAS_SOFTCAP,
                HEAD_DIM,
                HEAD_DIM_STORED,
                BLOCK_N,
                NUM_STAGES,
            )
        if CODES == "fp8":
            b_acc *= FP8_FACTOR * tl.load(head_scales_ptr + num_kv_heads + i_kv_head)
        b_sink = b_max
        if HAS_SINKS:
            b_sink = tl.load(sinks_ptr + b_head, mask=b_valid_m, other=0.0) * LOG2_E
        p_output = output_ptr + (i_seq.to(tl.int64) * num_heads + b_head)[:, None] * HEAD_DIM
        p_output += o_dim[None, :]
        if count == 1:
            b_output = finish(b_max, b_sum, b_acc, b_sink, HAS_SINKS)
            tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=b_mask)
        else:
            b_partial = i_partial.to(tl.int64) * num_heads + b_head
            b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(tl.maximum(b_sum, 1e-37)), -float("inf"))
            b_output = b_acc * (1.0 / tl.where(b_sum > 0.0, b_sum, 1.0))[:, None]
            tl.store(partial_lse_ptr + b_partial, b_lse, mask=b_valid_m)
            p_partial = partial_ptr + b_partial[:, None] * HEAD_DIM + o_dim[None, :]
            tl.store(p_partial, b_output, mask=b_mask)
            # All threads' stores come before the arrival, all arrivals before the last one's loads.
            tl.debug_barrier()
            p_arrived = arrived_ptr + i_seq * num_kv_heads + i_kv_head
            if tl.atomic_add(p_arrived, 1, sem="acq_rel") == count - 1:
                tl.debug_barrier()
                b_row = first_partial.to(tl.int64) * num_heads + b_head
                b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
                b_sum = tl.zeros([BLOCK_M], tl.float32)
                b_acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
                for i_span in tl.range(0, count, num_stages=1):
                    b_lse = tl.load(
                        partial_lse_ptr + b_row + i_span * num_heads,
                        mask=b_valid_m,
                        other=-float("inf"),
                        cache_modifier=".cg",
                    )
                    b_part = tl.load(
                        partial_ptr
                        + (b_row + i_span * num_heads)[:, None] * HEAD_DIM
                        + o_dim[None, :],
                        mask=b_mask,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    b_new_max = tl.maximum(b_max, b_lse)
                    b_decay = tl.exp2(b_max - b_new_max)
                    b_weight = tl.exp2(b_lse - b_new_max)
                    b_sum = b_sum * b_decay + b_weight
                    b_acc = b_acc * b_decay[:, None] + b_part * b_weight[:, None]
                    b_max = b_new_max
                b_output = finish(b_max, b_sum, b_acc, b_sink, HAS_SINKS)
                tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=b_mask)
                tl.store(p_arrived, 0)


@triton.jit(
    do_not_specialize=["block_tables_stride", "open_tables_stride", "num_kv_heads", "window"]
)
def prefill_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    pages_ptr,  # as in decode_kernel, and so on
    head_scales_ptr,
    halves_ptr,
    open_pages_ptr,
    sealed_lens_ptr,
    open_tables_ptr,
    open_tables_stride,
    sinks_ptr,
    tiles_ptr,  # (tiles, 2) int32: sequence, first row among its rows
    query_start_ptr,  # (num_seqs + 1,) int32
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
    BLOCK_M: tl.constexpr,  # query rows times padded group
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """A tile of one sequence's rows against all the keys that they see."""
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
    key_begin = 0
    if HAS_WINDOW:
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
    b_row_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if CODES != "none":
        b_factor = power_for(tl.max(tl.abs(b_query.to(tl.float32)), 1))
        b_query = b_query.to(tl.float32) * b_factor[:, None]
        b_row_scale = 1.0 / b_factor
    b_query = b_query.to(tl.dtype(COMPUTE))
    scale = score_scale
    if CODES == "fp8":
        scale *= FP8_FACTOR * tl.load(head_scales_ptr + i_kv_head)
    b_query_sum = tl.sum(b_query.to(tl.float32), 1)
    b_position = first_position + o_m // GROUP_PADDED
    b_max, b_sum, b_acc = start(BLOCK_M, HEAD_DIM_PADDED)
    closed_end = key_end
    if CODES == "sealed":
        sealed_len = tl.load(sealed_lens_ptr + i_seq)
        closed_end = tl.minimum(key_end, sealed_len)
    b_max, b_sum, b_acc = attend(
        b_query,
        b_query_sum,
        b_row_scale,
        b_position,
        b_max,
        b_sum,
        b_acc,
        pages_ptr,
        block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride,
        0,
        halves_ptr,
        i_kv_head,
        num_kv_heads,
        key_begin,
        closed_end,
        0,
        scale,
        cap,
        window,
        CODES,
        ASM,
        PAGE_ELEMENTS,
        PRECISION,
        True,
        CODES != "none",
        HAS_WINDOW,
        HAS_SOFTCAP,
        HEAD_DIM,
        HEAD_DIM_STORED,
        BLOCK_N,
        NUM_STAGES,
    )
    if CODES == "sealed":
        b_max, b_sum, b_acc = attend(
            b_query,
            b_query_sum,
            b_row_scale,
            b_position,
            b_max,
            b_sum,
            b_acc,
            open_pages_ptr,
            open_tables_ptr + i_seq.to(tl.int64) * open_tables_stride,
            sealed_len,
            None,
            i_kv_head,
            num_kv_heads,
            tl.maximum(key_begin, sealed_len),
            key_end,
            0,
            scale,
            cap,
            window,
            "int8",
            ASM,
            OPEN_ELEMENTS,
            PRECISION,
            True,
            CODES != "none",
            HAS_WINDOW,
            HAS_SOFTCAP,
            HEAD_DIM,
            HEAD_DIM_STORED,
            BLOCK_N,
            NUM_STAGES,
        )
    if CODES == "fp8":
        b_acc *= FP8_FACTOR * tl.load(head_scales_ptr + num_kv_heads + i_kv_head)
    b_sink = b_max
    if HAS_SINKS:
        b_sink = tl.load(sinks_ptr + b_head, mask=b_valid_m, other=0.0) * LOG2_E
    b_output = finish(b_max, b_sum, b_acc, b_sink, HAS_SINKS)
    b_output_row = b_query_row * (num_kv_heads * GROUP) + b_head
    tl.store(
        output_ptr + b_output_row[:, None] * HEAD_DIM + o_dim[None, :],
        b_output.to(output_ptr.dtype.element_ty),
        mask=b_valid_m[:, None] & (o_dim < HEAD_DIM)[None, :],
    )
