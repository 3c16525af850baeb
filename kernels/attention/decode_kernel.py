"""Paged attention on the GPU, decode: programs share out spans of the keys of few rows.

`spans_kernel` cuts the spans, `tile_kernel` folds pages, `merge_kernel` merges the partial results
of spans.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.merge_kernel import beside_sink, last_to_arrive, merge
from appliance.kernels.attention.tile_kernel import SMALLEST, attend, load_group, start


# A new width of the block tables must not recompile the kernel while serving.
@triton.jit(
    do_not_specialize=[
        "block_tables_stride",
        "open_tables_stride",
        "num_kv_heads",
        "window",
        "max_rows",
        "num_rows",
        "max_groups",
    ]
)
def decode_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    partial_ptr,  # (most_spans, num_kv_heads, num_rows * GROUP, head_dim) float32
    partial_lse_ptr,  # (most_spans, num_kv_heads, num_rows * GROUP) float32, base 2
    arrived_ptr,  # (num_seqs, 1 + max_groups, num_tiles) int32, zeros before and after
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    pages_ptr,  # (num_blocks, num_kv_heads, page) elements, or words of 4 bytes if quantized
    head_scales_ptr,  # (2, num_kv_heads) float32, of keys and values; "fp8" only
    halves_ptr,  # the pages as float16; this and the next four with "sealed" only
    open_pages_ptr,  # (num_open, num_kv_heads, page) int32: pages of 8 bits
    sealed_lens_ptr,  # (num_seqs,) int32, leading tokens in sealed pages
    open_tables_ptr,  # (num_seqs, max_open) int32, the open blocks of the tokens after them, see
    # `SealedSpans`
    open_tables_stride,
    sinks_ptr,  # (num_heads,) float32, or None
    spans_ptr,  # (capacity, SPAN_COLUMNS) int32
    num_spans_ptr,  # (1,) int32
    ends_ptr,  # (num_seqs, 2) int32, the first and the last span of each sequence
    max_rows,  # most tokens of a sequence
    num_rows,  # most of all sequences
    max_groups,  # most groups of FAN_IN spans of a sequence
    query_start_ptr,  # (num_seqs + 1,) int32
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
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN_COLUMNS: tl.constexpr,
    FAN_IN: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Take shares of the work in turn: a span for a KV head and some of its rows.

    Tokens times the heads of a group are the rows of one tile, so a few tokens cost as much as one:
    of one sequence, or of several that share a pass over the span. The last program to finish
    merges a sequence's partial results: first those of FAN_IN neighbouring spans, then the results
    of that.
    """
    PRECISION: tl.constexpr = "tf32x3" if COMPUTE == "fp32" else None
    TOKENS: tl.constexpr = BLOCK_M // GROUP  # of a tile
    o_m = tl.arange(0, BLOCK_M)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    num_heads = num_kv_heads * GROUP
    num_tiles = num_kv_heads * ((max_rows + TOKENS - 1) // TOKENS)
    step = num_heads.to(tl.int64) * num_rows  # from a span's partial results to the next one's
    num_items = tl.load(num_spans_ptr) * num_tiles

    for i in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        i_item = num_items - 1 - i  # late spans are the long ones
        i_tile = i_item % num_tiles
        i_row = i_item // num_tiles
        p_span = spans_ptr + i_row * SPAN_COLUMNS
        i_seq = tl.load(p_span)
        key_begin = tl.load(p_span + 1)
        key_end = tl.load(p_span + 2)
        i_span = tl.load(p_span + 3)
        num_members = tl.load(p_span + 4)
        query_start = tl.load(query_start_ptr + i_seq)
        own_rows = tl.load(query_start_ptr + i_seq + 1) - query_start
        context_len = tl.load(context_lens_ptr + i_seq)

        i_kv_head = i_tile % num_kv_heads
        first_token = i_tile // num_kv_heads * TOKENS
        # What is read of the first sequence holds for all that share the span, but for their rows.
        shared_rows = tl.load(query_start_ptr + i_seq + num_members) - query_start
        num_tokens = tl.minimum(shared_rows - first_token, TOKENS)
        num_m = tl.maximum(num_tokens, 0) * GROUP
        b_valid_m = o_m < num_m
        first_position = context_len - own_rows + first_token
        ends_context = key_end == context_len
        key_end = tl.where(num_tokens > 0, tl.minimum(key_end, first_position + num_tokens), 0)
        window_end = 0
        if HAS_WINDOW:
            window_end = first_position + num_tokens - window
            # Tiles of keys begin at multiples of their size, so a row's sum has the same parts in
            # every step.
            lowest_key = tl.maximum(first_position - window + 1, 0)
            key_begin = tl.maximum(key_begin, lowest_key // BLOCK_N * BLOCK_N)
        first_query = (query_start + first_token).to(tl.int64)
        p_query = query_ptr + first_query * query_stride + i_kv_head * GROUP * HEAD_DIM
        b_query, undo = load_group(
            p_query,
            query_stride,
            num_m,
            COMPUTE,
            CODES,
            GROUP,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            PARTS,
        )
        b_query_sum = tl.sum(b_query.to(tl.float32), 1)
        scale = score_scale
        if CODES == "fp8":
            scale *= FP8_FACTOR * tl.load(head_scales_ptr + i_kv_head)
        row_scale = tl.maximum(undo * scale, SMALLEST)
        b_position = first_position + o_m // GROUP
        b_max, b_sum, b_acc = start(BLOCK_M, HEAD_DIM_PADDED)
        # All rows see the keys before the first row's page, and all keys in sealed pages.
        full_end = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, key_end)
        if CODES == "sealed":
            sealed_len = tl.load(sealed_lens_ptr + i_seq)
            full_end = tl.minimum(sealed_len, key_end)
        p_table = block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride
        if COMPUTE == "fp32" and CODES == "none":
            full_end = key_begin  # one loop masks every page: registers are scarce
        else:
            b_max, b_sum, b_acc = attend(
                b_query,
                b_query_sum,
                row_scale,
                b_position,
                b_position,
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
        # Only few spans have keys that some rows do not see, or an open block.
        tail_begin = tl.maximum(key_begin, full_end)
        if tail_begin < key_end:
            if CODES == "sealed":
                p_table = open_tables_ptr + i_seq.to(tl.int64) * open_tables_stride
                b_max, b_sum, b_acc = attend(
                    b_query,
                    b_query_sum,
                    row_scale,
                    b_position,
                    b_position,
                    b_max,
                    b_sum,
                    b_acc,
                    open_pages_ptr,
                    p_table,
                    sealed_len,
                    None,
                    i_kv_head,
                    num_kv_heads,
                    tail_begin,
                    key_end,
                    cap,
                    window,
                    window_end,
                    "int8",
                    ASM,
                    OPEN_ELEMENTS,
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
            else:
                b_max, b_sum, b_acc = attend(
                    b_query,
                    b_query_sum,
                    row_scale,
                    b_position,
                    b_position,
                    b_max,
                    b_sum,
                    b_acc,
                    pages_ptr,
                    p_table,
                    0,
                    None,
                    i_kv_head,
                    num_kv_heads,
                    tail_begin,
                    key_end,
                    cap,
                    window,
                    window_end,
                    CODES,
                    ASM,
                    PAGE_ELEMENTS,
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
        b_acc *= (1.0 / tl.where(b_sum > 0.0, b_sum, 1.0))[:, None]
        b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(tl.maximum(b_sum, SMALLEST)), -float("inf"))
        b_mask = b_valid_m[:, None] & (o_dim < HEAD_DIM)[None, :]
        first_span = 0
        if HAS_WINDOW:
            first_span = tl.load(ends_ptr + i_seq * 2)
        if (i_span == first_span) & ends_context:
            b_head = i_kv_head * GROUP + o_m % GROUP
            b_output = b_acc
            if HAS_SINKS:
                b_sink = tl.load(sinks_ptr + b_head, mask=b_valid_m, other=0.0)
                b_output = b_acc * beside_sink(b_lse, b_sink)[:, None]
            b_row = (first_query + o_m // GROUP) * num_heads + b_head
            p_output = output_ptr + b_row[:, None] * HEAD_DIM + o_dim[None, :]
            tl.store(p_output, b_output.to(output_ptr.dtype.element_ty), mask=b_mask)
        else:
            # Place of the head's partial results of span 0, which need not exist.
            i_zero = (i_kv_head * num_rows + first_token) * GROUP - first_span * step
            b_partial = i_zero + query_start * GROUP + i_span * step + o_m
            tl.store(partial_lse_ptr + b_partial, b_lse, mask=b_valid_m)
            p_partial = partial_ptr + b_partial[:, None] * HEAD_DIM + o_dim[None, :]
            tl.store(p_partial, b_acc, mask=b_mask)
            for i_of in tl.range(i_seq, i_seq + num_members, num_stages=1):
                last_span = tl.load(ends_ptr + i_of * 2 + 1)
                first_group = first_span // FAN_IN
                last_group = last_span // FAN_IN
                i_group = i_span // FAN_IN
                begin = tl.maximum(i_group * FAN_IN, first_span)
                end = tl.minimum(i_group * FAN_IN + FAN_IN - 1, last_span)
                p_arrived = arrived_ptr + i_of * (max_groups + 1) * num_tiles + i_tile
                p_group = p_arrived + (1 + i_group - first_group) * num_tiles
                if last_to_arrive(p_group, end - begin + 1):
                    o_row = tl.arange(0, MERGE_ROWS)
                    b_in_dim = (o_dim < HEAD_DIM)[None, :]
                    own_start = tl.load(query_start_ptr + i_of)
                    own_tokens = tl.load(query_start_ptr + i_of + 1) - own_start - first_token
                    own_m = tl.maximum(tl.minimum(own_tokens, TOKENS), 0) * GROUP
                    i_own = i_zero + own_start * GROUP
                    if first_group < last_group:
                        for m in range(0, own_m, MERGE_ROWS):
                            b_valid = m + o_row < own_m
                            b_mean, b_weight = merge(
                                partial_ptr,
                                partial_lse_ptr,
                                i_own + m,
                                b_valid,
                                step,
                                begin,
                                end,
                                begin,
                                1,
                                MERGE_ROWS,
                                HEAD_DIM,
                                HEAD_DIM_PADDED,
                                FAN_IN,
                            )
                            # Overwrite the first one's place, once all threads have read it.
                            tl.debug_barrier()
                            b_merged = i_own + begin * step + m + o_row
                            p_merged = partial_ptr + b_merged[:, None] * HEAD_DIM + o_dim[None, :]
                            tl.store(p_merged, b_mean, mask=b_valid[:, None] & b_in_dim)
                            tl.store(partial_lse_ptr + b_merged, b_weight, mask=b_valid)
                    is_last = first_group == last_group
                    stride = 1
                    if first_group < last_group:
                        is_last = last_to_arrive(p_arrived, last_group - first_group + 1)
                        begin, end, stride = first_group, last_group, FAN_IN
                    if is_last:
                        for m in range(0, own_m, MERGE_ROWS):
                            b_valid = m + o_row < own_m
                            b_mean, b_weight = merge(
                                partial_ptr,
                                partial_lse_ptr,
                                i_own + m,
                                b_valid,
                                step,
                                begin,
                                end,
                                first_span,
                                stride,
                                MERGE_ROWS,
                                HEAD_DIM,
                                HEAD_DIM_PADDED,
                                FAN_IN,
                            )
                            b_at_head = i_kv_head * GROUP + (m + o_row) % GROUP
                            if HAS_SINKS:
                                b_beside = tl.load(sinks_ptr + b_at_head, mask=b_valid, other=0.0)
                                b_mean *= beside_sink(b_weight, b_beside)[:, None]
                            b_at = (own_start + first_token + (m + o_row) // GROUP).to(tl.int64)
                            b_at = b_at * num_heads + b_at_head
                            tl.store(
                                output_ptr + b_at[:, None] * HEAD_DIM + o_dim[None, :],
                                b_mean.to(output_ptr.dtype.element_ty),
                                mask=b_valid[:, None] & b_in_dim,
                            )
