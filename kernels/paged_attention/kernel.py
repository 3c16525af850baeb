"""Paged attention on the GPU: a tile of query rows against a span of keys, and the merge of spans.

The same body serves decode (one row per sequence, its keys split over many programs) and prefill
(a tile of rows, all their keys). Quantized elements are widened in registers only: the key scale
goes onto the scores, the value scale onto the probabilities.
"""

import triton
import triton.language as tl

# Start of a running maximum: finite, so that a row with every key masked leaves zeros, not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
# tanh is 1 in float32 from here on; the bound keeps exp2 finite.
TANH_LIMIT: tl.constexpr = tl.constexpr(64.0)


@triton.jit
def load_elements(p_base, b_row, b_valid, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Rows of keys or values: (BLOCK_N, HEAD_DIM_PADDED), zero where masked."""
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_offset = b_row[:, None] * HEAD_DIM + o_dim[None, :]
    if HEAD_DIM == HEAD_DIM_PADDED:
        b_mask = b_valid[:, None]
    else:
        b_mask = b_valid[:, None] & (o_dim < HEAD_DIM)[None, :]
    return tl.load(p_base + b_offset, mask=b_mask, other=0)


# A changing width of the block tables must not compile the kernel anew in the middle of serving.
@triton.jit(do_not_specialize=["block_tables_stride", "num_kv_heads", "window"])
def paged_attention_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    partial_ptr,  # (num_partials, num_heads, head_dim) float32; decode only
    partial_lse_ptr,  # (num_partials, num_heads) float32, base 2; decode only
    query_ptr,  # (num_tokens, num_heads, head_dim), rows query_stride apart
    keys_ptr,  # (num_blocks, block_size, num_kv_heads, head_dim)
    values_ptr,
    key_scales_ptr,  # (num_blocks, block_size, num_kv_heads) float16, or None
    value_scales_ptr,
    work_ptr,  # (programs, 4) int32, spans or tiles of work.py
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32
    block_tables_ptr,  # (num_seqs, max_blocks) int32
    query_stride,
    block_tables_stride,
    num_kv_heads,
    log2_scale,  # from scores, or from tanh if they are capped, to exponents of 2
    tanh_scale,  # from scores to twice the argument of tanh, in base 2
    window,
    KV_FORMAT: tl.constexpr,  # the value of a KVFormat
    COMPUTE_DTYPE: tl.constexpr,  # what both matrix products take: "bf16", "fp16", "fp32"
    DECODE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,  # query rows times padded group
    BLOCK_N: tl.constexpr,  # keys
):
    DTYPE: tl.constexpr = tl.dtype(COMPUTE_DTYPE)
    # Three TF32 products make one float32 product of nearly full precision on tensor cores.
    PRECISION: tl.constexpr = "tf32x3" if COMPUTE_DTYPE == "fp32" else None
    ROWS: tl.constexpr = BLOCK_M // GROUP_PADDED
    i_work, i_part, i_kv_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)

    p_work = work_ptr + i_work * 4
    i_seq = tl.load(p_work)
    if i_seq < 0:  # a row that only fills up the table
        return
    query_start = tl.load(query_start_ptr + i_seq)
    num_rows = tl.load(query_start_ptr + i_seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + i_seq)
    if DECODE:
        first_row = 0
        key_begin = tl.load(p_work + 1)
        key_end = tl.load(p_work + 2)
        i_partial = tl.load(p_work + 3)
    else:
        first_row = tl.load(p_work + 1) + i_part * ROWS
        if first_row >= num_rows:  # the last tile of a sequence may be short
            return
        key_begin = 0
        key_end = min(context_len, context_len - num_rows + first_row + ROWS)
    first_position = context_len - num_rows + first_row
    if HAS_WINDOW:
        # Tiles of keys stand at multiples of BLOCK_N, so that a row's sum is made of the same
        # parts wherever its tile of rows begins.
        key_begin = max(key_begin, (first_position - window + 1) // BLOCK_N * BLOCK_N)

    o_m = tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_row = first_row + o_m // GROUP_PADDED
    b_head = i_kv_head * GROUP + o_m % GROUP_PADDED
    b_valid_m = (b_row < num_rows) & (o_m % GROUP_PADDED < GROUP)
    b_position = first_position + o_m // GROUP_PADDED
    b_mask_q = b_valid_m[:, None] & (o_dim < HEAD_DIM)[None, :]
    num_heads = num_kv_heads * GROUP

    b_query_row = (query_start + b_row).to(tl.int64)
    b_query = tl.load(
        query_ptr + (b_query_row * query_stride + b_head * HEAD_DIM)[:, None] + o_dim[None, :],
        mask=b_mask_q,
        other=0.0,
    ).to(DTYPE)

    b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    p_table = block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride

    for key_start in range(key_begin, key_end, BLOCK_N):
        b_key_position = key_start + o_n
        b_valid_n = b_key_position < key_end
        if HAS_WINDOW:
            b_valid_n &= b_key_position > first_position - window
        b_block = tl.load(p_table + b_key_position // BLOCK_SIZE, mask=b_valid_n, other=0)
        b_slot = b_block.to(tl.int64) * BLOCK_SIZE + b_key_position % BLOCK_SIZE
        b_kv_row = b_slot * num_kv_heads + i_kv_head

        b_key = load_elements(keys_ptr, b_kv_row, b_valid_n, HEAD_DIM, HEAD_DIM_PADDED)
        b_score = tl.dot(b_query, tl.trans(b_key.to(DTYPE)), input_precision=PRECISION)
        if KV_FORMAT == "int8":
            b_key_scale = tl.load(key_scales_ptr + b_kv_row, mask=b_valid_n, other=0.0)
            b_score *= b_key_scale.to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            b_score = 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(b_score * tanh_scale, TANH_LIMIT)))

        b_seen = b_valid_n[None, :]
        if not DECODE:
            b_seen &= b_key_position[None, :] <= b_position[:, None]
            if HAS_WINDOW:
                b_seen &= b_key_position[None, :] > b_position[:, None] - window
        b_score = tl.where(b_seen, b_score, -float("inf"))

        b_new_max = tl.maximum(b_max, tl.max(b_score, 1) * log2_scale)
        b_decay = tl.exp2(b_max - b_new_max)
        b_weight = tl.exp2(b_score * log2_scale - b_new_max[:, None])
        b_sum = b_sum * b_decay + tl.sum(b_weight, 1)
        b_max = b_new_max

        b_value = load_elements(values_ptr, b_kv_row, b_valid_n, HEAD_DIM, HEAD_DIM_PADDED)
        if KV_FORMAT == "int8":
            b_value_scale = tl.load(value_scales_ptr + b_kv_row, mask=b_valid_n, other=0.0)
            b_weight *= b_value_scale.to(tl.float32)[None, :]
        b_acc = tl.dot(
            b_weight.to(DTYPE),
            b_value.to(DTYPE),
            b_acc * b_decay[:, None],
            input_precision=PRECISION,
        )

    b_output = b_acc / tl.where(b_sum > 0.0, b_sum, 1.0)[:, None]
    if DECODE:
        b_partial = i_partial * num_heads + b_head
        b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(tl.maximum(b_sum, 1e-37)), -float("inf"))
        tl.store(partial_lse_ptr + b_partial, b_lse, mask=b_valid_m & (i_partial >= 0))
        p_partial = partial_ptr + (b_partial * HEAD_DIM)[:, None] + o_dim[None, :]
        tl.store(p_partial, b_output, mask=b_mask_q & (i_partial >= 0))
        b_mask_q &= i_partial < 0
    b_output_row = b_query_row * num_heads + b_head
    tl.store(
        output_ptr + (b_output_row * HEAD_DIM)[:, None] + o_dim[None, :],
        b_output.to(output_ptr.dtype.element_ty),
        mask=b_mask_q,
    )


@triton.jit
def merge_partials_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    partial_ptr,  # (num_partials, num_heads, head_dim) float32
    partial_lse_ptr,  # (num_partials, num_heads) float32, base 2
    work_ptr,  # (merges, 4) int32: sequence, first partial, number of partials
    query_start_ptr,
    num_heads,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
):
    i_merge, i_head = tl.program_id(0), tl.program_id(1)
    i_seq = tl.load(work_ptr + i_merge * 4)
    first = tl.load(work_ptr + i_merge * 4 + 1)
    count = tl.load(work_ptr + i_merge * 4 + 2)
    if i_seq < 0:
        return
    o_partial = tl.arange(0, MAX_PARTIALS)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    b_row = (first + o_partial) * num_heads + i_head
    b_lse = tl.load(partial_lse_ptr + b_row, mask=o_partial < count, other=-float("inf"))
    b_weight = tl.exp2(b_lse - tl.maximum(tl.max(b_lse, 0), LOWEST))
    # A span without a visible key has weight 0 whatever its partial result says.
    b_mask = (b_weight > 0.0)[:, None] & (o_dim < HEAD_DIM)[None, :]
    p_partial = partial_ptr + (b_row * HEAD_DIM)[:, None] + o_dim[None, :]
    b_partial = tl.load(p_partial, mask=b_mask, other=0.0)
    b_output = tl.sum(b_partial * b_weight[:, None], 0) / tl.sum(b_weight, 0)
    output_row = tl.load(query_start_ptr + i_seq).to(tl.int64) * num_heads + i_head
    tl.store(
        output_ptr + output_row * HEAD_DIM + o_dim,
        b_output.to(output_ptr.dtype.element_ty),
        mask=o_dim < HEAD_DIM,
    )
