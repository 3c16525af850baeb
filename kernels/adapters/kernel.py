"""Adds adapters on the GPU to rows sorted by slot, as `grouped_matmul` sorts pairs by expert.

Shrinking splits the inputs among programs, which leave partial sums; expanding adds these up in one
order. Grids are bounded by shapes alone, and blocks without rows end at once.
"""

import triton
import triton.language as tl

from appliance.kernels.device.group_products import load_x


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    shrunk_ptr,  # (splits, num_tokens, num_parts * RANK) float32
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    shrink_ptr,  # (num_slots, num_parts * RANK, in_features), slots slot_stride apart
    ranks_ptr,  # (num_slots, num_parts) int32, slots parts_stride apart
    rows_ptr,  # (num_blocks * BLOCK_M,) int32, sorted by slot; below 0: none
    slots_ptr,  # (num_blocks,) int32; below 0: none
    num_tokens,
    in_features,
    x_stride,
    slot_stride,
    parts_stride,
    num_parts,
    span,  # inputs of a program, a multiple of BLOCK_K
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of one slot's rows by some numbers of one part, over some of the inputs."""
    i_m, i_split = tl.program_id(0), tl.program_id(2)
    i_part, first = tl.program_id(1) // (RANK // BLOCK_R), tl.program_id(1) % (RANK // BLOCK_R)
    i_slot = tl.load(slots_ptr + i_m).to(tl.int64)
    if i_slot < 0:
        return
    rank = tl.load(ranks_ptr + i_slot * parts_stride + i_part)
    if rank <= first * BLOCK_R:
        return
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DTYPE else None  # float32 is for checks
    b_row = tl.load(rows_ptr + i_m * BLOCK_M + tl.arange(0, BLOCK_M))
    b_valid = b_row >= 0
    b_x_row = b_row.to(tl.int64) * x_stride
    b_rank = first * BLOCK_R + tl.arange(0, BLOCK_R)
    b_in_rank = b_rank < rank
    o_k = tl.arange(0, BLOCK_K)
    start = i_split * span
    p_shrink = shrink_ptr + i_slot * slot_stride
    p_shrink += ((i_part * RANK + b_rank) * in_features)[:, None] + o_k[None, :]
    b_acc = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
    num_blocks = tl.cdiv(tl.minimum(span, in_features - start), BLOCK_K)
    for i_block in tl.range(num_blocks, num_stages=STAGES):
        at = start + i_block * BLOCK_K
        b_mask = b_in_rank[:, None]
        if not EVEN_K:
            b_mask = b_mask & (at + o_k < in_features)[None, :]
        b_shrink = tl.load(p_shrink + at, mask=b_mask, other=0.0)
        b_x = load_x(x_ptr, b_x_row, b_valid, at, in_features, BLOCK_K, EVEN_K)
        b_acc = tl.dot(b_shrink, b_x, b_acc, input_precision=PRECISION)
    b_at = (i_split * num_tokens + b_row).to(tl.int64) * (num_parts * RANK)
    p_shrunk = shrunk_ptr + b_at[None, :] + (i_part * RANK + b_rank)[:, None]
    tl.store(p_shrunk, b_acc, mask=b_valid[None, :])  # zero beyond the rank


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    out_ptr,  # (num_tokens, outputs), rows out_stride apart; added to
    shrunk_ptr,  # of `shrink_kernel`
    # (num_slots, rows of all pieces, RANK), slots slot_stride apart; zero beyond a part's rank
    expand_ptr,
    scales_ptr,  # (num_slots, num_parts) float32, slots parts_stride apart
    ranks_ptr,
    blocks_ptr,  # (n, 4) int32: first output, first row of `expand`, outputs, part
    rows_ptr,
    slots_ptr,
    num_tokens,
    out_stride,
    slot_stride,
    parts_stride,
    num_parts,
    SPLITS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A block of one slot's rows by some outputs of one part."""
    i_m, p_block = tl.program_id(0), blocks_ptr + tl.program_id(1) * 4
    i_slot = tl.load(slots_ptr + i_m).to(tl.int64)
    if i_slot < 0:
        return
    i_part = tl.load(p_block + 3)
    rank = tl.load(ranks_ptr + i_slot * parts_stride + i_part)
    if rank == 0:
        return
    first_output, first_row, count = tl.load(p_block), tl.load(p_block + 1), tl.load(p_block + 2)
    scale = tl.load(scales_ptr + i_slot * parts_stride + i_part)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    PRECISION: tl.constexpr = "ieee" if tl.float32 == DTYPE else None  # float32 is for checks
    b_row = tl.load(rows_ptr + i_m * BLOCK_M + tl.arange(0, BLOCK_M))
    b_valid = b_row >= 0
    o_n, o_r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    b_in_block = o_n < count
    p_expand = expand_ptr + i_slot * slot_stride + ((first_row + o_n) * RANK)[:, None]
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_block in tl.range(tl.cdiv(rank, BLOCK_R), num_stages=1):
        b_rank = i_block * BLOCK_R + o_r
        b_shrunk = tl.zeros((BLOCK_R, BLOCK_M), tl.float32)
        for i_split in tl.range(SPLITS, num_stages=1):
            b_at = (i_split * num_tokens + b_row).to(tl.int64) * (num_parts * RANK)
            p_shrunk = shrunk_ptr + b_at[None, :] + (i_part * RANK + b_rank)[:, None]
            b_shrunk += tl.load(p_shrunk, mask=b_valid[None, :], other=0.0)
        b_expand = tl.load(p_expand + b_rank[None, :], mask=b_in_block[:, None], other=0.0)
        b_acc = tl.dot(b_expand, (b_shrunk * scale).to(DTYPE), b_acc, input_precision=PRECISION)
    p_out = out_ptr + b_row.to(tl.int64)[None, :] * out_stride + (first_output + o_n)[:, None]
    b_mask = b_valid[None, :] & b_in_block[:, None]
    b_out = tl.load(p_out, mask=b_mask, other=0.0).to(tl.float32) + b_acc
    tl.store(p_out, b_out.to(DTYPE), mask=b_mask)
