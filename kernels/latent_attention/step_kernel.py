"""Kernels around latent attention: write a step's tokens, map queries and sums of latents.

Keys and values of all heads are linear in the latents: a head's query is mapped into their space
before they are read, and the sum of latents to the head's value after.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.tile_kernel import LOWEST, power_for
from appliance.kernels.kv_page import layout
from appliance.kernels.kv_write.kernel import write_heads

PAGE: tl.constexpr = tl.constexpr(layout.PAGE_TOKENS)


@triton.jit
def turned(p_x, p_cos, p_sin, b_pair, b_mask, ROTARY: tl.constexpr):
    """Return the rotated part of some rows in float32; `b_pair` are its elements."""
    TURN: tl.constexpr = ROTARY // 2
    o_other = tl.where(b_pair < TURN, b_pair + TURN, b_pair - TURN)
    b_x = tl.load(p_x + b_pair, mask=b_mask, other=0.0).to(tl.float32)
    b_other = tl.load(p_x + o_other, mask=b_mask, other=0.0).to(tl.float32)
    b_cos = tl.load(p_cos + b_pair % TURN, mask=b_mask, other=1.0)
    b_sin = tl.load(p_sin + b_pair % TURN, mask=b_mask, other=0.0)
    return b_x * b_cos + b_other * tl.where(b_pair < TURN, -b_sin, b_sin)


@triton.jit(do_not_specialize=["rank"])
def write_latents_kernel(
    queries_ptr,  # (num_tokens, rank), normed latents of queries; or None
    pages_ptr,  # (num_blocks, page) elements, or bytes of codes
    halves_ptr,  # the same memory as float16; of codes only
    found_ptr,  # rows stride apart: rank elements, or queries; then the token
    norm_ptr,  # (LATENT,) float32
    query_norm_ptr,  # (rank,) float32, or None
    cos_ptr,  # (num_tokens, ROTARY / 2) float32
    sin_ptr,
    slot_mapping_ptr,  # (num_tokens,) int64; rows with a negative slot are not written
    rank,  # of queries; or all their elements
    stride,
    eps,
    query_eps,
    KV_FORMAT: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HALF_STORED: tl.constexpr,
    PAGE_ELEMENTS: tl.constexpr,
    RANK_PADDED: tl.constexpr,
):
    """Norm a token's latent, rotate what is beside it, and write both; or norm a query's latent."""
    DTYPE: tl.constexpr = found_ptr.dtype.element_ty
    HALF: tl.constexpr = (LATENT + ROTARY) // 2
    i_token = tl.program_id(0).to(tl.int64)
    p_row = found_ptr + i_token * stride
    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping_ptr + i_token)
        if slot >= 0:
            p_token = p_row + rank
            o_latent = tl.arange(0, LATENT_PADDED)
            b_x = tl.load(p_token + o_latent, mask=o_latent < LATENT, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(b_x * b_x, 0) / LATENT + eps)
            p_cos = cos_ptr + i_token * (ROTARY // 2)
            p_sin = sin_ptr + i_token * (ROTARY // 2)
            o_head = tl.arange(0, 1)
            o_half = tl.arange(0, HALF_PADDED)
            for i in tl.static_range(2):
                o_element = i * HALF + o_half
                b_in = o_half < HALF
                b_latent = b_in & (o_element < LATENT)
                b_x = tl.load(p_token + o_element, mask=b_latent, other=0.0).to(tl.float32)
                b_x = b_x * root * tl.load(norm_ptr + o_element, mask=b_latent, other=0.0)
                b_turning = b_in & (o_element >= LATENT)
                b_pair = tl.maximum(o_element - LATENT, 0)
                b_turned = turned(p_token + LATENT, p_cos, p_sin, b_pair, b_turning, ROTARY)
                b_x = tl.where(b_latent, b_x, b_turned).to(DTYPE).to(tl.float32)
                write_heads(
                    b_x[None, :],
                    pages_ptr,
                    halves_ptr,
                    None,
                    slot // PAGE + o_head,
                    (slot % PAGE).to(tl.int32),
                    o_head,
                    o_head == 0,
                    KV_FORMAT,
                    i == 1,
                    HALF,
                    HALF_STORED,
                    PAGE_ELEMENTS,
                )
    elif query_norm_ptr is not None:
        o_rank = tl.arange(0, RANK_PADDED)
        b_in = o_rank < rank
        b_x = tl.load(p_row + o_rank, mask=b_in, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(b_x * b_x, 0) / rank + query_eps)
        b_x = b_x * root * tl.load(query_norm_ptr + o_rank, mask=b_in, other=0.0)
        tl.store(queries_ptr + i_token * rank + o_rank, b_x.to(DTYPE), mask=b_in)


@triton.jit(do_not_specialize=["num_tokens", "num_heads"])
def map_queries_kernel(
    mapped_ptr,  # (num_tokens, num_heads, LATENT + ROTARY)
    undo_ptr,  # (num_tokens, num_heads) float32, inverse scales; None where queries have none
    query_ptr,  # (num_tokens, num_heads, PLAIN + ROTARY), rows query_stride apart
    keys_ptr,  # (num_heads, PLAIN, LATENT)
    cos_ptr,  # (num_tokens, ROTARY / 2) float32
    sin_ptr,
    scale_ptr,  # (num_tokens,) float32, a factor of queries; or None
    num_tokens,
    num_heads,
    query_stride,
    PLAIN: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Map a head's queries into the space of latents, and rotate the rest.

    Each step rounds to the queries' dtype. Where the products with codes are in float16, a power of
    two then scales each query, exactly, so that it holds them.
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else None
    i_head = tl.program_id(0)
    b_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_valid = b_m < num_tokens
    o_latent = tl.arange(0, LATENT_PADDED)
    b_row = tl.minimum(b_m, num_tokens - 1).to(tl.int64)  # the last row stands in for none
    p_query = query_ptr + b_row[:, None] * query_stride + i_head * (PLAIN + ROTARY)
    p_keys = keys_ptr + i_head.to(tl.int64) * (PLAIN * LATENT)
    b_acc = tl.zeros((BLOCK_M, LATENT_PADDED), tl.float32)
    for start in tl.range(0, PLAIN, BLOCK_K, num_stages=STAGES):
        b_k = start + tl.arange(0, BLOCK_K)
        b_query = tl.load(p_query + b_k[None, :], mask=(b_k < PLAIN)[None, :], other=0.0)
        b_mask = (b_k < PLAIN)[:, None] & (o_latent < LATENT)[None, :]
        b_keys = tl.load(p_keys + b_k[:, None] * LATENT + o_latent[None, :], mask=b_mask, other=0.0)
        b_acc = tl.dot(b_query, b_keys, b_acc, input_precision=PRECISION)
    o_turning = tl.arange(0, ROTARY_PADDED)
    b_turning = (o_turning < ROTARY)[None, :]
    b_angle = b_row[:, None] * (ROTARY // 2)
    b_rest = turned(
        p_query + PLAIN, cos_ptr + b_angle, sin_ptr + b_angle, o_turning[None, :], b_turning, ROTARY
    )
    b_rest = tl.where(b_turning, b_rest, 0.0).to(DTYPE).to(tl.float32)
    b_acc = b_acc.to(DTYPE).to(tl.float32)
    if scale_ptr is not None:
        b_scale = tl.load(scale_ptr + b_row).to(DTYPE).to(tl.float32)[:, None]
        b_acc = (b_acc * b_scale).to(DTYPE).to(tl.float32)
        b_rest = (b_rest * b_scale).to(DTYPE).to(tl.float32)
    b_at = b_row * num_heads + i_head
    if undo_ptr is not None:
        b_largest = tl.maximum(tl.max(tl.abs(b_acc), 1), tl.max(tl.abs(b_rest), 1))
        b_factor = power_for(b_largest)
        tl.store(undo_ptr + b_at, 1.0 / b_factor, mask=b_valid)
        b_acc *= b_factor[:, None]
        b_rest *= b_factor[:, None]
    OUT: tl.constexpr = mapped_ptr.dtype.element_ty
    p_mapped = mapped_ptr + b_at[:, None] * (LATENT + ROTARY)
    b_mask = b_valid[:, None] & (o_latent < LATENT)[None, :]
    tl.store(p_mapped + o_latent[None, :], b_acc.to(OUT), mask=b_mask)
    b_mask = b_valid[:, None] & b_turning
    tl.store(p_mapped + LATENT + o_turning[None, :], b_rest.to(OUT), mask=b_mask)


@triton.jit(do_not_specialize=["num_seqs", "max_rows", "num_heads", "num_rows"])
def latent_values_kernel(
    output_ptr,  # (num_tokens, num_heads, VALUE)
    partial_ptr,  # as `latent_decode_kernel` leaves them, and so on
    partial_lse_ptr,
    values_ptr,  # (num_heads, VALUE, LATENT)
    ends_ptr,  # (num_seqs, 2) int32, the first span of each sequence, which is 0, and the last
    query_start_ptr,
    num_seqs,
    max_rows,  # most tokens of a sequence
    num_heads,
    num_rows,  # most tokens of all sequences
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AT_ONCE: tl.constexpr,  # partial results that are merged at a time
    ROWS: tl.constexpr,
):
    """Merge the spans' partial results of a head in some rows, and map them to its values.

    The merge is exact where all spans but one are empty, and takes them in the same order for any
    rows.
    """
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else None
    i_head = tl.program_id(0)
    o_latent = tl.arange(0, LATENT_PADDED)
    b_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    b_seq = tl.minimum(b_row // max_rows, num_seqs - 1)
    b_token = b_row % max_rows
    b_start = tl.load(query_start_ptr + b_seq)
    b_tokens = tl.load(query_start_ptr + b_seq + 1) - b_start
    b_valid = (b_row < num_seqs * max_rows) & (b_token < b_tokens)
    b_last = tl.load(ends_ptr + b_seq * 2 + 1, mask=b_valid, other=-1)
    step = (num_rows * num_heads).to(tl.int64)  # from a span's partial results to the next one's
    b_zero = ((b_start + b_token) * num_heads + i_head).to(tl.int64)
    b_largest = tl.full((ROWS,), LOWEST, tl.float32)
    b_total = tl.zeros((ROWS,), tl.float32)
    b_acc = tl.zeros((ROWS, LATENT_PADDED), tl.float32)
    for at in tl.range(0, tl.max(b_last, 0) + 1, AT_ONCE, num_stages=1):
        b_new = b_largest
        for i in tl.static_range(AT_ONCE):
            b_lse = tl.load(
                partial_lse_ptr + b_zero + (at + i) * step,
                mask=at + i <= b_last,
                other=-float("inf"),
                cache_modifier=".cg",
            )
            b_new = tl.maximum(b_new, b_lse)
        b_decay = tl.exp2(b_largest - b_new)
        b_total *= b_decay
        b_acc *= b_decay[:, None]
        b_largest = b_new
        for i in tl.static_range(AT_ONCE):
            b_there = at + i <= b_last
            b_from = b_zero + (at + i) * step
            b_lse = tl.load(
                partial_lse_ptr + b_from, mask=b_there, other=-float("inf"), cache_modifier=".cg"
            )
            b_part = tl.load(
                partial_ptr + b_from[:, None] * LATENT + o_latent[None, :],
                mask=b_there[:, None] & (o_latent < LATENT)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            b_weight = tl.exp2(b_lse - b_new)
            b_total += b_weight
            b_acc += b_part * b_weight[:, None]
    b_acc *= (1.0 / tl.where(b_total > 0.0, b_total, 1.0))[:, None]
    b_mean = tl.trans(b_acc.to(DTYPE))
    p_values = values_ptr + i_head.to(tl.int64) * (VALUE * LATENT)
    p_output = output_ptr + ((b_start + b_token).to(tl.int64) * num_heads + i_head) * VALUE
    for start in tl.range(0, VALUE, BLOCK_V, num_stages=2):
        b_v = start + tl.arange(0, BLOCK_V)
        b_mask = (b_v < VALUE)[:, None] & (o_latent < LATENT)[None, :]
        p_some = p_values + b_v[:, None] * LATENT + o_latent[None, :]
        b_values = tl.load(p_some, mask=b_mask, other=0.0)
        b_out = tl.dot(b_values, b_mean, input_precision=PRECISION)
        tl.store(
            p_output[None, :] + b_v[:, None],
            b_out.to(DTYPE),
            mask=(b_v < VALUE)[:, None] & b_valid[None, :],
        )
