"""Latent attention on the GPU: all heads read one row of each token, as its key and as its value.

A row of queries is a head of a token; a sequence's rows lie one after another, so a tile takes any
neighbours of them. In decode programs share out spans of the keys and leave partial results, which
`latent_values_kernel` merges; in prefill a program folds all keys of its rows.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.tile_kernel import (
    LARGEST_INVERSE,
    PAGE,
    SMALLEST,
    exp2,
    log2,
    start,
)
from appliance.kernels.kv_page import layout
from appliance.kernels.kv_page.kernel import row_halves, scale_of

STRIP: tl.constexpr = tl.constexpr(layout.DIM_STEP)
ONES: tl.constexpr = tl.constexpr(0x3C003C00)  # a record of scales of 1


@triton.jit
def load_queries(
    p_query,  # where the first row's query begins
    num_rows,  # rows of the tile that exist
    o_dim,  # elements of a query
    last,  # the first element that is padding
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return some elements of the queries, (BLOCK_M, elements)."""
    o_m = tl.arange(0, BLOCK_M)
    b_mask = (o_m < num_rows)[:, None] & (o_dim < last)[None, :]
    p_row = p_query + (o_m * WIDTH)[:, None] + o_dim[None, :]
    return tl.load(p_row, mask=b_mask, other=0.0)


@triton.jit
def places(o_element, HALF: tl.constexpr, IS_CODES: tl.constexpr):
    """Return where a page has elements of its first token: its halves lie apart, codes in strips.

    A strip has STRIP codes of each token.
    """
    if IS_CODES and HALF // STRIP * STRIP == HALF:  # whose contiguity the compiler sees
        return o_element // STRIP * (PAGE * STRIP) + o_element % STRIP
    elif IS_CODES:
        STORED: tl.constexpr = (HALF + STRIP - 1) // STRIP * STRIP
        o_in_half = o_element % HALF
        o_strip = o_element // HALF * (STORED // STRIP) + o_in_half // STRIP
        return o_strip * (PAGE * STRIP) + o_in_half % STRIP
    else:
        return o_element + o_element // HALF * ((PAGE - 1) * HALF)


@triton.jit
def scaled_rows(b_code, o_element, b_first, b_second, HALF: tl.constexpr, ASM: tl.constexpr):
    """Return codes (tokens, elements) times the scales of their halves, in their dtype."""
    b_scale = tl.where((o_element < HALF)[None, :], b_first[:, None], b_second[:, None])
    return row_halves(b_code, ASM).to(b_scale.dtype) * b_scale


@triton.jit
def attend_latents(
    p_query,  # where the tile's first query begins
    p_undo,  # its inverse scale; of codes only
    num_rows,  # of the tile
    b_position,  # (BLOCK_M,) positions of the rows
    pages_ptr,
    records_ptr,  # the pages as int32; of codes only
    p_table,  # the sequence's blocks
    key_begin,  # a multiple of BLOCK_N
    key_end,
    score_scale,  # from scores to exponents of 2
    ASM: tl.constexpr,
    COMPUTE: tl.constexpr,
    IS_CODES: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return a tile's mean of the latents up to each row's position, and its logarithm of the sum.

    A row without a key gets zeros and -inf. Each latent is read once, for both products. Codes
    become float16 with the scale of their half of the token as a share of the larger one, which
    goes onto scores and weights.
    """
    PRECISION: tl.constexpr = "tf32x3" if COMPUTE == "fp32" else None
    WIDTH: tl.constexpr = LATENT + ROTARY
    HALF: tl.constexpr = WIDTH // 2  # of a token, which a page holds in two halves
    RECORD: tl.constexpr = PAGE * ((HALF + STRIP - 1) // STRIP * STRIP) // 2  # in words
    TOKEN: tl.constexpr = STRIP if IS_CODES else HALF  # from one token to the next
    o_n = tl.arange(0, BLOCK_N)
    o_latent = tl.arange(0, LATENT_PADDED)
    o_rotary = LATENT + tl.arange(0, ROTARY_PADDED)
    b_query = load_queries(p_query, num_rows, o_latent, LATENT, BLOCK_M, WIDTH)
    b_turned = load_queries(p_query, num_rows, o_rotary, WIDTH, BLOCK_M, WIDTH)
    row_scale = score_scale
    if IS_CODES:
        o_m = tl.arange(0, BLOCK_M)
        b_undo = tl.load(p_undo + o_m, mask=o_m < num_rows, other=0.0)
        row_scale = tl.maximum(score_scale * b_undo, SMALLEST)[:, None]
    b_query = b_query.to(tl.dtype(COMPUTE))
    b_turned = b_turned.to(tl.dtype(COMPUTE))
    o_latent_place = places(o_latent, HALF, IS_CODES)
    o_rotary_place = places(o_rotary, HALF, IS_CODES)
    b_max, b_sum, b_acc = start(BLOCK_M, LATENT_PADDED)
    for key_start in tl.range(key_begin, key_end, BLOCK_N, num_stages=NUM_STAGES):
        i_block = tl.load(p_table + key_start // PAGE).to(tl.int64)
        b_key_position = key_start + o_n
        b_valid = (b_key_position < key_end)[:, None]
        p_token = pages_ptr + i_block * PAGE_ELEMENTS
        i_slot = key_start - key_start // PAGE * PAGE
        p_token += i_slot * TOKEN
        p_token += (o_n * TOKEN)[:, None]
        b_mask = b_valid
        if LATENT < LATENT_PADDED:
            b_mask = b_valid & (o_latent < LATENT)[None, :]
        b_latent = tl.load(p_token + o_latent_place[None, :], mask=b_mask, other=0)
        b_mask = b_valid
        if ROTARY < ROTARY_PADDED:
            b_mask = b_valid & (o_rotary < WIDTH)[None, :]
        b_key = tl.load(p_token + o_rotary_place[None, :], mask=b_mask, other=0)
        if IS_CODES:
            p_record = records_ptr + i_block * (PAGE_ELEMENTS // 4) + RECORD + i_slot + o_n
            b_record = tl.load(p_record, mask=b_key_position < key_end, other=ONES)
            b_first, b_second = scale_of(b_record), scale_of(b_record >> 16)
            b_token_scale = tl.maximum(b_first, b_second)
            b_inverse = 1.0 / b_token_scale
            b_first = (b_first * b_inverse).to(b_query.dtype)
            b_second = (b_second * b_inverse).to(b_query.dtype)
            b_latent = scaled_rows(b_latent, o_latent, b_first, b_second, HALF, ASM)
            b_key = scaled_rows(b_key, o_rotary, b_first, b_second, HALF, ASM)
        b_latent = b_latent.to(b_query.dtype)
        b_key = b_key.to(b_query.dtype)

        b_score = tl.dot(b_query, tl.trans(b_latent), input_precision=PRECISION)
        b_score = tl.dot(b_turned, tl.trans(b_key), b_score, input_precision=PRECISION)
        b_seen = b_key_position[None, :] <= b_position[:, None]
        b_score *= row_scale
        if IS_CODES:
            # The scale of a latent is part of its weight's exponent, so the largest weight is 1.
            b_addend = log2(b_token_scale, ASM)
            b_score = b_score * b_token_scale[None, :] + b_addend[None, :]
        b_score = tl.where(b_seen, b_score, -float("inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_score, 1))
        b_weight = exp2(b_score - b_new_max[:, None], ASM)
        b_decay = exp2(b_max - b_new_max, ASM)
        b_max = b_new_max
        b_share = b_weight
        if IS_CODES:
            b_share *= tl.minimum(exp2(-b_addend, ASM), LARGEST_INVERSE)[None, :]
        b_sum = b_sum * b_decay + tl.sum(b_share, 1)
        b_acc *= b_decay[:, None]
        b_weight = b_weight.to(b_query.dtype)
        b_acc = tl.dot(b_weight, b_latent, b_acc, input_precision=PRECISION)
    b_acc *= (1.0 / tl.where(b_sum > 0.0, b_sum, 1.0))[:, None]
    b_lse = tl.where(b_sum > 0.0, b_max + tl.log2(tl.maximum(b_sum, SMALLEST)), -float("inf"))
    return b_acc, b_lse


# A new width of the block tables, or number of rows, must not recompile a kernel while serving.
@triton.jit(do_not_specialize=["block_tables_stride", "num_heads", "num_rows", "num_tiles"])
def latent_decode_kernel(
    partial_ptr,  # (most_spans, num_rows, num_heads, LATENT) float32
    partial_lse_ptr,  # (most_spans, num_rows, num_heads) float32, base 2
    query_ptr,  # (num_tokens, num_heads, LATENT + ROTARY)
    undo_ptr,  # (num_tokens, num_heads) float32, the queries' inverse scales; of codes only
    pages_ptr,  # (num_blocks, page) elements, or bytes of codes
    records_ptr,  # the pages as int32; of codes only
    spans_ptr,  # (capacity, SPAN_COLUMNS) int32
    num_spans_ptr,  # (1,) int32
    query_start_ptr,  # (num_seqs + 1,) int32
    context_lens_ptr,  # (num_seqs,) int32
    block_tables_ptr,  # (num_seqs, max_blocks) int32
    block_tables_stride,
    num_heads,
    num_rows,  # most tokens of all sequences
    num_tiles,  # of the heads of a sequence's most tokens
    score_scale,
    ASM: tl.constexpr,
    COMPUTE: tl.constexpr,
    IS_CODES: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN_COLUMNS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Take shares of the work in turn: a span of a sequence's keys for a tile of its rows."""
    o_m = tl.arange(0, BLOCK_M)
    o_latent = tl.arange(0, LATENT_PADDED)
    num_items = tl.load(num_spans_ptr) * num_tiles
    for i in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        i_item = num_items - 1 - i  # late spans are the long ones
        first_row = i_item % num_tiles * BLOCK_M
        p_span = spans_ptr + i_item // num_tiles * SPAN_COLUMNS
        i_seq = tl.load(p_span)
        query_start = tl.load(query_start_ptr + i_seq)
        num_tokens = tl.load(query_start_ptr + i_seq + 1) - query_start
        context_len = tl.load(context_lens_ptr + i_seq)
        tile_rows = tl.minimum(num_tokens * num_heads - first_row, BLOCK_M)
        first_position = context_len - num_tokens
        last_position = first_position + (first_row + tile_rows - 1) // num_heads
        key_end = tl.minimum(tl.load(p_span + 2), last_position + 1)
        i_query = query_start.to(tl.int64) * num_heads + first_row
        p_undo = undo_ptr
        if IS_CODES:
            p_undo += i_query
        b_mean, b_lse = attend_latents(
            query_ptr + i_query * (LATENT + ROTARY),
            p_undo,
            tile_rows,
            first_position + (first_row + o_m) // num_heads,
            pages_ptr,
            records_ptr,
            block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride,
            tl.load(p_span + 1),
            tl.where(tile_rows > 0, key_end, 0),
            score_scale,
            ASM,
            COMPUTE,
            IS_CODES,
            PAGE_ELEMENTS,
            LATENT,
            LATENT_PADDED,
            ROTARY,
            ROTARY_PADDED,
            BLOCK_M,
            BLOCK_N,
            NUM_STAGES,
        )
        # Read anew: where the results go to takes no registers until here.
        i_seq = tl.load(p_span, volatile=True)
        query_start = tl.load(query_start_ptr + i_seq, volatile=True)
        num_tokens = tl.load(query_start_ptr + i_seq + 1, volatile=True) - query_start
        tile_rows = tl.minimum(num_tokens * num_heads - first_row, BLOCK_M)
        i_partial = tl.load(p_span + 3).to(tl.int64) * num_rows + query_start
        i_partial = i_partial * num_heads + first_row
        b_valid = o_m < tile_rows
        tl.store(partial_lse_ptr + i_partial + o_m, b_lse, mask=b_valid)
        p_partial = partial_ptr + i_partial * LATENT + (o_m * LATENT)[:, None] + o_latent[None, :]
        tl.store(p_partial, b_mean, mask=b_valid[:, None] & (o_latent < LATENT)[None, :])


@triton.jit(do_not_specialize=["block_tables_stride", "num_heads"])
def latent_prefill_kernel(
    output_ptr,  # (num_tokens, num_heads, LATENT)
    query_ptr,  # as in `latent_decode_kernel`, and so on
    undo_ptr,
    pages_ptr,
    records_ptr,
    tiles_ptr,  # (tiles, 2) int32: sequence, first token among its tokens
    query_start_ptr,
    context_lens_ptr,
    block_tables_ptr,
    block_tables_stride,
    num_heads,
    score_scale,
    ASM: tl.constexpr,
    COMPUTE: tl.constexpr,
    IS_CODES: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attend from some rows of a tile's tokens to all the keys that they see."""
    o_m = tl.arange(0, BLOCK_M)
    o_latent = tl.arange(0, LATENT_PADDED)
    p_tile = tiles_ptr + tl.program_id(0) * 2
    i_seq = tl.load(p_tile)
    query_start = tl.load(query_start_ptr + i_seq)
    num_tokens = tl.load(query_start_ptr + i_seq + 1) - query_start
    context_len = tl.load(context_lens_ptr + i_seq)
    first_token = tl.load(p_tile + 1)
    if first_token >= num_tokens:  # a step's last tiles may be padding
        return
    first_row = first_token * num_heads + tl.program_id(1) * BLOCK_M
    num_rows = tl.minimum(num_tokens * num_heads - first_row, BLOCK_M)
    if num_rows <= 0:  # the last tile of a sequence may be short
        return
    first_position = context_len - num_tokens
    last_position = first_position + (first_row + num_rows - 1) // num_heads
    i_row = query_start.to(tl.int64) * num_heads + first_row
    p_undo = undo_ptr
    if IS_CODES:
        p_undo += i_row
    b_mean, _ = attend_latents(
        query_ptr + i_row * (LATENT + ROTARY),
        p_undo,
        num_rows,
        first_position + (first_row + o_m) // num_heads,
        pages_ptr,
        records_ptr,
        block_tables_ptr + i_seq.to(tl.int64) * block_tables_stride,
        0,
        last_position + 1,
        score_scale,
        ASM,
        COMPUTE,
        IS_CODES,
        PAGE_ELEMENTS,
        LATENT,
        LATENT_PADDED,
        ROTARY,
        ROTARY_PADDED,
        BLOCK_M,
        BLOCK_N,
        NUM_STAGES,
    )
    # Read anew: where the rows go to takes no registers until here.
    query_start = tl.load(query_start_ptr + i_seq, volatile=True)
    num_tokens = tl.load(query_start_ptr + i_seq + 1, volatile=True) - query_start
    first_row = tl.load(p_tile + 1, volatile=True) * num_heads + tl.program_id(1) * BLOCK_M
    num_rows = tl.minimum(num_tokens * num_heads - first_row, BLOCK_M)
    i_row = query_start.to(tl.int64) * num_heads + first_row
    tl.store(
        output_ptr + i_row * LATENT + (o_m * LATENT)[:, None] + o_latent[None, :],
        b_mean.to(output_ptr.dtype.element_ty),
        mask=(o_m < num_rows)[:, None] & (o_latent < LATENT)[None, :],
    )
