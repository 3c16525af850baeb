"""Grouped matmul on the GPU: rows of x sorted by expert, each block times its expert's weight.

A pair is a token with one of its experts: pair p belongs to token p // top_k. Grids are bounded by
shapes alone and nothing is read back, so a graph can capture all of it. Codes are widened as in
`packed_matmul`, with the same order of tiles.
"""

import triton
import triton.language as tl

from appliance.kernels.device.group_products import add_group, add_tiles, load_scales, load_x
from appliance.kernels.gated_activation.kernel import gated_rows
from appliance.kernels.weight_codes.kernel import tile_scales, to_weights, zero_points

TILE_N: tl.constexpr = tl.constexpr(64)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NOBODY: tl.constexpr = tl.constexpr(-1)  # no pair, or no expert


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    counts_ptr,  # (num_experts,) int32
    ids_ptr,  # (num_pairs,) int64
    num_pairs,
    CHUNK: tl.constexpr,
):
    """Count the pairs of one expert per program."""
    i_expert = tl.program_id(0)
    b_count = tl.zeros((CHUNK,), tl.int32)
    for start in tl.range(0, num_pairs, CHUNK, num_stages=1):
        o_pair = start + tl.arange(0, CHUNK)
        b_id = tl.load(ids_ptr + o_pair, mask=o_pair < num_pairs, other=NOBODY)
        b_count += (b_id == i_expert).to(tl.int32)
    tl.store(counts_ptr + i_expert, tl.sum(b_count, 0))


@triton.jit(do_not_specialize=["num_parts", "num_pairs", "num_blocks"])
def sort_kernel(
    pairs_ptr,  # (num_blocks * BLOCK_M,) int32, NOBODY at the end of an expert's last block
    experts_ptr,  # (num_blocks,) int32, NOBODY behind the last block
    counts_ptr,  # (num_parts, num_experts) int32, of parts of all pairs
    ids_ptr,
    num_parts,
    num_pairs,
    num_blocks,
    num_experts,
    EXPERTS: tl.constexpr,  # a power of two, at least num_experts
    PARTS: tl.constexpr,  # whose counts are read together
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write one expert's pairs per program, in order, into blocks of its own."""
    i_expert = tl.program_id(0)
    o_expert = tl.arange(0, EXPERTS)
    b_count = tl.zeros((EXPERTS,), tl.int32)
    for start in tl.range(0, num_parts, PARTS, num_stages=1):
        o_part = start + tl.arange(0, PARTS)
        b_mask = (o_part < num_parts)[:, None] & (o_expert < num_experts)[None, :]
        p_count = counts_ptr + o_part[:, None] * num_experts + o_expert[None, :]
        b_count += tl.sum(tl.load(p_count, mask=b_mask, other=0), 0)
    b_blocks = (b_count + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(o_expert < i_expert, b_blocks, 0), 0)
    end_block = first_block + tl.sum(tl.where(o_expert == i_expert, b_blocks, 0), 0)
    at = first_block * BLOCK_M
    for start in tl.range(0, num_pairs, CHUNK, num_stages=1):
        o_pair = start + tl.arange(0, CHUNK)
        b_id = tl.load(ids_ptr + o_pair, mask=o_pair < num_pairs, other=NOBODY)
        b_mine = (b_id == i_expert).to(tl.int32)
        tl.store(pairs_ptr + at + tl.cumsum(b_mine, 0) - 1, o_pair, mask=b_mine > 0)
        at += tl.sum(b_mine, 0)
    o_rest = at + tl.arange(0, BLOCK_M)
    tl.store(pairs_ptr + o_rest, o_rest * 0 + NOBODY, mask=o_rest < end_block * BLOCK_M)
    for start in tl.range(first_block, end_block, CHUNK, num_stages=1):
        o_block = start + tl.arange(0, CHUNK)
        tl.store(experts_ptr + o_block, o_block * 0 + i_expert, mask=o_block < end_block)
    if i_expert == num_experts - 1:
        for start in tl.range(end_block, num_blocks, CHUNK, num_stages=1):
            o_block = start + tl.arange(0, CHUNK)
            tl.store(experts_ptr + o_block, o_block * 0 + NOBODY, mask=o_block < num_blocks)


@triton.jit
def lay_out_inputs_kernel(
    out_ptr,  # (num_pairs, in_features)
    x_ptr,  # (num_pairs / SHARE, in_features), rows x_stride apart
    ids_ptr,  # (num_pairs,) int64, the expert of each pair
    order_ptr,  # (num_experts, in_features) int32, or None
    weights_ptr,  # (num_pairs,) float32, or None
    in_features,
    x_stride,
    num_experts,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lay out a pair's row: in the order of its expert's columns, or times its weight.

    There is no row for experts that are elsewhere where there is an order.
    """
    i_pair = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_mask = o_column < in_features
    b_input = o_column
    if order_ptr is not None:
        i_expert = tl.load(ids_ptr + i_pair)
        b_mask = b_mask & (i_expert >= 0) & (i_expert < num_experts)
        b_input = tl.load(order_ptr + i_expert * in_features + o_column, mask=b_mask, other=0)
    b_x = tl.load(x_ptr + i_pair // SHARE * x_stride + b_input, mask=b_mask)
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + i_pair).to(x_ptr.dtype.element_ty).to(tl.float32)
        b_x = (b_x.to(tl.float32) * weight).to(x_ptr.dtype.element_ty)
    tl.store(out_ptr + i_pair * in_features + o_column, b_x, mask=b_mask)


@triton.jit
def grouped_matmul_kernel(
    out_ptr,  # (num_pairs, out_features), half of them if there is an ACTIVATION
    x_ptr,  # (num_pairs / SHARE, in_features), rows x_stride apart
    pairs_ptr,  # of `sort_kernel`
    experts_ptr,
    # (experts * tiles_n, tiles in k, words) int32 as in `packed_matmul_kernel`, or for "dense"
    # (experts * tiles_n * TILE_N, in_features) in the type of x
    weight_ptr,
    params_ptr,  # as in `packed_matmul_kernel`, of all experts
    channel_scale_ptr,
    bias_ptr,  # (experts * tiles_n * TILE_N,) float32, or None
    sums_ptr,  # of `group_sums_kernel` for the rows of x if groups with OFFSETS span tiles, or None
    out_features,
    in_features,
    x_stride,
    sums_stride,  # or None
    tiles_n,  # of one expert
    blocks_k,  # of BLOCK_K inputs
    SHARE: tl.constexpr,  # pairs that read one row of x
    ACTIVATION: tl.constexpr,  # of `gated_rows`; None: all are said
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    CODES: tl.constexpr,
    AXES: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    OFFSETS: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILEWISE: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply a block of one expert's pairs by some rows of its weight."""
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    i_expert = tl.load(experts_ptr + i_m)
    if i_expert < 0:
        return
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TILES_N: tl.constexpr = BLOCK_N // TILE_N
    # Inputs multiplied before a scale is applied: a group, or the two of one tile.
    PART_K: tl.constexpr = BLOCK_K if GROUP == 0 else max(GROUP, TILE_K)
    STEP_K: tl.constexpr = TILE_K if TILEWISE else PART_K
    TILES_K: tl.constexpr = STEP_K // TILE_K
    b_pair = tl.load(pairs_ptr + i_m * BLOCK_M + tl.arange(0, BLOCK_M))
    b_valid = b_pair >= 0
    b_x_row = (b_pair // SHARE).to(tl.int64) * x_stride
    b_sums_row = tl.maximum(b_pair, 0) // SHARE  # padding takes any, and is not stored
    o_n = tl.arange(0, BLOCK_N)
    b_n = i_n * BLOCK_N + o_n
    i_tile = i_expert * tiles_n + i_n * TILES_N
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if CODES == "dense":
        PRECISION: tl.constexpr = "tf32x3" if tl.float32 == DTYPE else None
        o_k = tl.arange(0, BLOCK_K)
        b_row = (i_tile * TILE_N + o_n).to(tl.int64) * in_features
        for i_block in tl.range(blocks_k, num_stages=STAGES):
            b_k = i_block * BLOCK_K + o_k
            b_mask = (b_n < out_features)[:, None]
            if not EVEN_K:
                b_mask = b_mask & (b_k < in_features)[None, :]
            p_weight = weight_ptr + b_row[:, None] + b_k[None, :]
            b_weight = tl.load(p_weight, mask=b_mask, other=0.0)
            b_x = load_x(x_ptr, b_x_row, b_valid, i_block * BLOCK_K, in_features, BLOCK_K, EVEN_K)
            b_acc = tl.dot(b_weight, b_x, b_acc, input_precision=PRECISION)
    else:
        tiles_k = blocks_k * (BLOCK_K // TILE_K)
        num_groups = 1 if GROUP == 0 else blocks_k * (BLOCK_K // GROUP)
        b_words_at = (i_tile + tl.arange(0, TILES_N)).to(tl.int64)[:, None] * tiles_k * WORDS
        p_tiles = weight_ptr + b_words_at
        for i_block in tl.range(blocks_k, num_stages=STAGES):
            if GROUP != 0 and GROUP < TILE_K:
                b_acc = add_tiles(
                    b_acc, x_ptr, b_x_row, b_valid, p_tiles + i_block * (BLOCK_K // TILE_K * WORDS),
                    params_ptr, None, 0, 0, i_tile, i_block, blocks_k, in_features, OFFSETS, CODES,
                    AXES, WORDS, TILE_K, PARAMS, RECORD, GROUP, EVEN_K, BLOCK_K, ASM,
                )  # fmt: skip
            else:
                o_word = tl.arange(0, TILES_K * WORDS)[None, :]
                for i_part in tl.static_range(BLOCK_K // PART_K):
                    start = i_block * BLOCK_K + i_part * PART_K
                    b_product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if GROUP != 0 else b_acc
                    for i_step in tl.static_range(PART_K // STEP_K):
                        at = start + i_step * STEP_K
                        b_words = tl.load(p_tiles + o_word + at // TILE_K * WORDS)
                        b_x = load_x(x_ptr, b_x_row, b_valid, at, in_features, STEP_K, EVEN_K)
                        b_weight = widened(
                            b_words, params_ptr, i_tile, tiles_k, num_groups, at, TILES_N, TILES_K,
                            AXES, TILE_K, PARAMS, GROUP, SCALES, CODES, STEP_K, DTYPE, ASM,
                        )  # fmt: skip
                        b_product = tl.dot(b_weight, b_x, b_product)
                    if GROUP == 0:
                        b_acc = b_product
                    else:
                        i_group = start // GROUP
                        b_scale, b_offset = load_scales(
                            params_ptr, i_tile, num_groups, i_group, TILES_N, PARAMS
                        )
                        b_sums_at = b_sums_row
                        if sums_ptr is not None:
                            b_sums_at += i_group * sums_stride
                        b_acc = add_group(
                            b_acc, b_product, None, b_scale, b_offset, sums_ptr, b_sums_at
                        )
    if channel_scale_ptr is not None:
        b_acc *= tl.load(channel_scale_ptr + i_tile * TILE_N + o_n)[:, None]
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + i_tile * TILE_N + o_n)[:, None]
    columns = out_features
    if ACTIVATION is not None:
        b_acc = gated_rows(b_acc, ACTIVATION, LIMIT, ALPHA)
        b_n = i_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        columns = out_features // 2
    b_at = b_pair.to(tl.int64)[None, :] * columns + b_n[:, None]
    b_mask = b_valid[None, :] & (b_n < columns)[:, None]
    tl.store(out_ptr + b_at, b_acc.to(DTYPE), mask=b_mask)


@triton.jit
def widened(
    b_words,
    params_ptr,
    i_tile,
    tiles_k,
    num_groups,
    at,  # the first input
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    AXES: tl.constexpr,
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    CODES: tl.constexpr,
    SIDE_K: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return weights (TILES_N * TILE_N, SIDE_K) of some words, without the scale of their group."""
    b_one, b_other = None, None
    if PARAMS == "fp16_zero":
        b_one, b_other = zero_points(
            params_ptr, i_tile, num_groups, at // GROUP, b_words, TILES_N, TILES_K, DTYPE, ASM
        )
    if SCALES:
        b_one, b_other = tile_scales(
            params_ptr, i_tile, tiles_k, at // TILE_K, b_words, TILES_N, TILES_K, SCALES, ASM
        )
    return to_weights(
        b_words, b_one, b_other, TILES_N, TILES_K, AXES, TILES_N * TILE_N, SIDE_K, CODES, DTYPE, ASM
    )


@triton.jit
def add_experts_kernel(
    out_ptr,  # (num_tokens, width)
    y_ptr,  # (num_tokens * TOP_K, width), a row for each pair
    weights_ptr,  # (num_tokens * TOP_K,) float32; None where inputs were weighed
    ids_ptr,  # (num_tokens * TOP_K,) int64 if only some experts are here, or None
    shared_ptr,  # (num_tokens, width) what is added, rows shared_stride apart; or None
    gate_ptr,  # logit of each token's factor of that, gate_stride apart; or None
    width,
    num_experts,  # that are here
    shared_stride,
    gate_stride,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the weighted outputs of a token's experts, in the order in which they were chosen."""
    i_token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_mask = o_column < width
    b_total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        i_pair = i_token * TOP_K + i
        b_here = b_mask
        if ids_ptr is not None:
            i_expert = tl.load(ids_ptr + i_pair)
            b_here = b_mask & (i_expert >= 0) & (i_expert < num_experts)
        b_y = tl.load(y_ptr + i_pair * width + o_column, mask=b_here, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            b_y *= tl.load(weights_ptr + i_pair)
        b_total += b_y
    if shared_ptr is not None:
        p_shared = shared_ptr + i_token * shared_stride + o_column
        b_shared = tl.load(p_shared, mask=b_mask, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + i_token * gate_stride)
            b_shared *= 1.0 / (1.0 + tl.exp2(-gate * LOG2_E))
        b_total += b_shared
    b_out = b_total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + i_token * width + o_column, b_out, mask=b_mask)
