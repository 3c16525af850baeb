"""The inner loop of paged attention on the GPU: folds pages of one sequence into a running softmax.

Codes are widened in registers only: a key's scale goes onto its scores, a value's onto its
probabilities, and sums of queries and probabilities bring in the offsets.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.parts_kernel import (
    add_values,
    by_part,
    by_row,
    decayed,
    query_places,
    score,
    whole,
)
from appliance.kernels.kv_page.kernel import as_value_rows, codes_tile, scale_of

PAGE: tl.constexpr = tl.constexpr(32)  # tokens
# Start of a running maximum: finite, so that a row with every key masked leaves zeros, not NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)
# The least scale of a row and the least divisor: a row of zeros must not make them 0.
SMALLEST: tl.constexpr = tl.constexpr(1.0e-37)
# tanh is 1 in float32 from here on; the bound keeps exp2 finite.
TANH_LIMIT: tl.constexpr = tl.constexpr(64.0)
# No token has a scale below the smallest float16.
LARGEST_INVERSE: tl.constexpr = tl.constexpr(2.0**24)
# Queries get this exponent before they become float16, far from both ends of its range.
QUERY_EXPONENT: tl.constexpr = tl.constexpr(8)


@triton.jit
def exp2(x, ASM: tl.constexpr):
    """Return 2^x; the plain instruction flushes subnormal results to 0."""
    if ASM == "none":
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2(x, ASM: tl.constexpr):
    """Return the logarithm of normal numbers; -inf of 0."""
    if ASM == "none":
        return tl.where(x > 0.0, tl.log2(tl.where(x > 0.0, x, 1.0)), -float("inf"))
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        )


@triton.jit
def start(BLOCK_M: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Return the state of an empty softmax: maximum, sum of weights, weighted values."""
    b_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    return b_max, b_sum, tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)


@triton.jit
def scaled(b_code, b_scale, b_offset, ASM: tl.constexpr):
    """Return b_code * b_scale + b_offset in float16, rounded once."""
    b_scale, b_offset = (
        tl.broadcast_to(b_scale, b_code.shape),
        tl.broadcast_to(b_offset, b_code.shape),
    )
    if ASM == "none":
        wide = b_code.to(tl.float32) * b_scale.to(tl.float32) + b_offset.to(tl.float32)
        return wide.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [b_code, b_scale, b_offset],
            tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def power_for(largest):
    """Return the power of two that scales a number to 2^QUERY_EXPONENT or more, below double."""
    bits = largest.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.maximum(bits, QUERY_EXPONENT << 23) - (QUERY_EXPONENT << 23)
    return ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def load_valid(pointer, mask, other: tl.constexpr):
    """Load where a mask is True; everything where it is None."""
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=other)


@triton.jit
def attend(
    b_query,  # (BLOCK_M, HEAD_DIM_PADDED), dtype of both products
    b_query_sum,  # (BLOCK_M,) float32, of each row; "int4" only
    row_scale,  # from products to exponents of 2, or to tanh's argument; with codes (BLOCK_M,)
    b_position,  # (BLOCK_M,) positions of the rows
    b_last,  # (BLOCK_M,) the last keys that they see
    b_max,  # (BLOCK_M,) float32, running maximum, base 2
    b_sum,  # (BLOCK_M,) float32, of weights
    b_acc,  # (BLOCK_M, HEAD_DIM_PADDED) float32, weighted values
    pages_ptr,
    p_table,  # its first entry is of the page that holds key `table_begin`
    table_begin,
    halves_ptr,  # the pages as float16; "sealed" only
    i_kv_head,
    num_kv_heads,
    key_begin,  # a multiple of BLOCK_N
    key_end,
    cap,
    window,
    window_end,  # no window hides a key from here on; without EDGES only
    CODES: tl.constexpr,
    ASM: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    EDGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_STORED: tl.constexpr,
    PARTS: tl.constexpr,  # of a head's dimensions, one for each warp; 1 leaves them together
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Fold the keys and values of some pages into a running softmax.

    A row sees the keys up to its last one, with HAS_WINDOW from the oldest of the `window` up to
    its position. Without EDGES every row sees every key unless for the window, and keys fill whole
    tiles, so few masks are computed.
    """
    BLOCK_M: tl.constexpr = b_query.shape[0]
    HEAD_DIM_PADDED: tl.constexpr = b_query.shape[1]
    BY_TOKEN: tl.constexpr = CODES != "none" and CODES != "fp8"  # values have scales of their own
    o_n = tl.arange(0, BLOCK_N)
    o_dim = tl.arange(0, HEAD_DIM_PADDED)
    if CODES == "none":
        ELEMENTS: tl.constexpr = PAGE * HEAD_DIM  # of keys, then of values
    else:
        CODE_BITS: tl.constexpr = 4 if CODES == "int4" or CODES == "sealed" else 8
        WORDS: tl.constexpr = HEAD_DIM_STORED * CODE_BITS  # of keys, then of values: 32 tokens
        o_word = tl.arange(0, HEAD_DIM_PADDED * CODE_BITS)

    b_query = by_part(b_query, PARTS)
    b_acc = by_part(b_acc, PARTS)
    b_scale = row_scale if CODES == "none" else row_scale[:, None]
    b_extra = tl.zeros([BLOCK_M], tl.float32)  # what the values' offsets add to every dimension
    for key_start in tl.range(key_begin, key_end, BLOCK_N, num_stages=NUM_STAGES):
        b_key_position = key_start + o_n
        b_valid_n = (b_key_position < key_end) if EDGES else None
        if CODES == "none":
            if BLOCK_N <= PAGE:
                i_block = tl.load(p_table + (key_start - table_begin) // PAGE).to(tl.int64)
                p_page = pages_ptr + (i_block * num_kv_heads + i_kv_head) * PAGE_ELEMENTS
                if BLOCK_N < PAGE:
                    p_page += (key_start - key_start // PAGE * PAGE) * HEAD_DIM
                p_key = p_page + ((o_n * HEAD_DIM)[:, None] + o_dim[None, :])
            else:
                p_block = p_table + (b_key_position - table_begin) // PAGE
                b_block = load_valid(p_block, b_valid_n, 0).to(tl.int64)
                b_page = (b_block * num_kv_heads + i_kv_head) * PAGE_ELEMENTS
                p_key = pages_ptr + (b_page + o_n % PAGE * HEAD_DIM)[:, None] + o_dim[None, :]
            b_mask = b_valid_n[:, None] if EDGES else None
            if HEAD_DIM != HEAD_DIM_PADDED:
                b_mask = (o_dim < HEAD_DIM)[None, :] & (b_key_position < key_end)[:, None]
            b_key = tl.trans(load_valid(p_key, b_mask, 0.0).to(b_query.dtype))
            b_value = load_valid(p_key + ELEMENTS, b_mask, 0.0).to(b_query.dtype)
        else:
            tl.static_assert(BLOCK_N == PAGE)
            i_block = tl.load(p_table + (key_start - table_begin) // PAGE).to(tl.int64)
            p_page = pages_ptr + (i_block * num_kv_heads + i_kv_head) * PAGE_ELEMENTS
            if HEAD_DIM_STORED == HEAD_DIM_PADDED:
                b_key_word = tl.load(p_page + o_word)
                b_value_word = tl.load(p_page + WORDS + o_word)
            else:
                b_key_word = tl.load(p_page + o_word, mask=o_word < WORDS, other=0)
                b_value_word = tl.load(p_page + WORDS + o_word, mask=o_word < WORDS, other=0)
            # A hidden slot's scales read as 0, which no token has.
            p_record = p_page + 2 * WORDS + o_n
            if CODES != "fp8":
                b_record = load_valid(p_record, b_valid_n, 0)
            b_value_record = 0
            if CODES == "int4":
                b_value_record = load_valid(p_record + PAGE, b_valid_n, 0)
            elif CODES == "sealed":
                b_value_record = b_record
            b_key = codes_tile(b_key_word, CODES, ASM, True, HEAD_DIM_PADDED)
            if CODES == "sealed":
                # Scales by dimension belong to the page, so they go onto the keys.
                p_channel = halves_ptr + (i_block * num_kv_heads + i_kv_head) * (2 * PAGE_ELEMENTS)
                p_channel += 4 * WORDS + 2 * PAGE + o_dim
                b_in = o_dim < HEAD_DIM_STORED
                b_spread = tl.load(p_channel, mask=b_in, other=0.0)
                b_centre = tl.load(p_channel + HEAD_DIM_STORED, mask=b_in, other=0.0)
                b_key = scaled(b_key, b_spread[:, None], b_centre[:, None], ASM)
            b_key = b_key.to(b_query.dtype)
            b_value = codes_tile(b_value_word, CODES, ASM, False, HEAD_DIM_PADDED)
            b_value = b_value.to(b_query.dtype)

        b_score = score(b_query, b_key, PRECISION, PARTS)
        if CODES == "int8":
            b_score *= scale_of(b_record)[None, :]
            b_value_scale = scale_of(b_record >> 16)
        elif CODES == "int4":
            b_score *= scale_of(b_record)[None, :]
            b_score += b_query_sum[:, None] * scale_of(b_record >> 16)[None, :]
            b_value_scale = scale_of(b_value_record)
        elif CODES == "sealed":
            b_value_scale = scale_of(b_value_record)
        if HAS_SOFTCAP:
            b_score = tl.minimum(b_score * b_scale, TANH_LIMIT)
            b_score = cap * (1.0 - 2.0 / (1.0 + exp2(b_score, ASM)))
        if BY_TOKEN:
            # The value's scale is part of the exponent, so the largest weight is 1 and no weight
            # that counts is lost to the range of float16.
            b_addend = log2(b_value_scale, ASM)
            if HAS_SOFTCAP:
                b_score += b_addend[None, :]
            else:
                b_score = b_score * b_scale + b_addend[None, :]
        if EDGES:
            b_seen = b_key_position[None, :] <= b_last[:, None]
            if HAS_WINDOW:
                b_seen &= b_key_position[None, :] > b_position[:, None] - window
            b_score = tl.where(b_seen, b_score, -float("inf"))
        elif HAS_WINDOW:  # noqa: SIM102 - this is known when compiled, the next when run
            if key_start < window_end:
                b_seen = b_key_position[None, :] > b_position[:, None] - window
                b_score = tl.where(b_seen, b_score, -float("inf"))

        b_largest = tl.max(b_score, 1)
        if BY_TOKEN or HAS_SOFTCAP:
            b_new_max = tl.maximum(b_max, b_largest)
            b_weight = exp2(b_score - b_new_max[:, None], ASM)
        else:
            # Scaled in the exponent: product and sum are one instruction.
            b_new_max = tl.maximum(b_max, b_largest * row_scale)
            b_weight = exp2(b_score * b_scale - b_new_max[:, None], ASM)
        b_decay = exp2(b_max - b_new_max, ASM)
        b_max = b_new_max
        b_share = b_weight
        if BY_TOKEN:
            b_share *= tl.minimum(exp2(-b_addend, ASM), LARGEST_INVERSE)[None, :]
        b_sum = b_sum * b_decay + tl.sum(b_share, 1)
        b_acc = decayed(b_acc, b_decay, PARTS)
        if CODES == "int4" or CODES == "sealed":
            b_offset = scale_of(b_value_record >> 16)
            b_extra = b_extra * b_decay + tl.sum(b_share * b_offset[None, :], 1)
        b_weight = b_weight.to(b_query.dtype)
        if CODES != "none":
            b_weight = as_value_rows(b_weight)
        b_acc = add_values(b_acc, b_weight, b_value, PRECISION, PARTS)
    b_acc = whole(b_acc, PARTS)
    if CODES == "int4" or CODES == "sealed":
        b_acc += b_extra[:, None]
    return b_max, b_sum, b_acc


@triton.jit
def load_group(
    p_query,  # of the first head of the group, of the tile's first token
    query_stride,
    num_m,  # rows of the tile that exist
    COMPUTE: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return some tokens' queries of a group of heads, (16, HEAD_DIM_PADDED), and their inverse
    scale.

    Against codes they become float16 after an exact multiplication by a power of two.
    """
    if CODES == "none":
        o_m = tl.arange(0, 16)
        o_dim = tl.arange(0, HEAD_DIM_PADDED)
        b_mask = (o_m < num_m)[:, None] & (o_dim < HEAD_DIM)[None, :]
        b_row = o_m // GROUP * query_stride + o_m % GROUP * HEAD_DIM
        b_query = tl.load(p_query + b_row[:, None] + o_dim[None, :], mask=b_mask, other=0.0)
        return b_query.to(tl.dtype(COMPUTE)), 1.0
    else:
        o = tl.arange(0, 16 * HEAD_DIM_PADDED)
        o_m, o_dim = query_places(o, PARTS)
        b_mask = (o_m < num_m) & (o_dim < HEAD_DIM)
        b_row = o_m // GROUP * query_stride + o_m % GROUP * HEAD_DIM
        b_query = tl.load(p_query + b_row + o_dim, mask=b_mask, other=0.0).to(tl.float32)
        b_query = by_row(b_query, PARTS)
        b_factor = power_for(tl.max(tl.abs(b_query), 1))
        return (b_query * b_factor[:, None]).to(tl.dtype(COMPUTE)), 1.0 / b_factor
