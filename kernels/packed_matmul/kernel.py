"""Packed matmul on the GPU: out.T = weight @ x.T, codes widened in registers, float32 sums.

The weight is operand A of the tensor cores, so few rows of x cost little. Its codes lie in memory
in the order of A's fragments: threads load 16 bytes each, and widened codes never pass through
shared memory. Each group has a product of its own, whose sum takes the group's scale; or, with
FOLDED, weights take it, and all products add to one sum.
"""

import triton
import triton.language as tl

from appliance.kernels.device.code_planes import code_of, named_value
from appliance.kernels.device.dependent_launch import prefetch_lines, wait_for_previous
from appliance.kernels.device.group_products import (
    add_group,
    add_tiles,
    load_scales,
    load_x,
    scales_of_words,
)
from appliance.kernels.device.scale_records import load_record, record_scales
from appliance.kernels.device.scaled_products import multiply_scaled
from appliance.kernels.device.trellis_symbols import load_weights, rows_of
from appliance.kernels.gated_activation.kernel import gated_rows
from appliance.kernels.weight_codes.kernel import (
    tile_scales,
    to_scaled_weights,
    to_weights,
    zero_points,
)

TILE_N: tl.constexpr = tl.constexpr(64)
LINE: tl.constexpr = tl.constexpr(32)  # words of memory that are prefetched together
LINES: tl.constexpr = tl.constexpr(128)  # of codes that are prefetched for each tile of features


@triton.jit
def leave_partial(b_acc, partial_ptr, arrived_ptr, i_out, i_split, splits):
    """Store a split's sum; return True for the last split of its output tile."""
    ROWS: tl.constexpr = b_acc.shape[0]
    COLUMNS: tl.constexpr = b_acc.shape[1]
    o_at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    i_partial = i_out.to(tl.int64) * splits + i_split
    # To L2, where the program that adds them up reads them.
    tl.store(partial_ptr + i_partial * (ROWS * COLUMNS) + o_at, b_acc, cache_modifier=".cg")
    tl.debug_barrier()  # all threads have written before one of them arrives
    arrived = tl.atomic_add(arrived_ptr + i_out, 1, sem="acq_rel", scope="gpu")
    return arrived == splits - 1


@triton.jit
def sum_partials(
    partial_ptr, arrived_ptr, i_out, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum an output tile's splits, always in their order, and reset the counter."""
    tl.store(arrived_ptr + i_out, 0)
    o_at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    p_partial = partial_ptr + i_out.to(tl.int64) * splits * (ROWS * COLUMNS) + o_at
    b_acc = tl.load(p_partial, cache_modifier=".cg")
    for i in tl.range(1, splits, num_stages=1):
        b_acc += tl.load(p_partial + i * (ROWS * COLUMNS), cache_modifier=".cg")
    return b_acc


@triton.jit(do_not_specialize=["num_tokens"])
def packed_matmul_kernel(
    out_ptr,  # (num_tokens, out_features)
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    codes_ptr,  # (tiles in n, tiles in k, words) int32
    # (tiles in n, groups, [2,] TILE_N) int32, the bits of scales and offsets; with SCALES
    # (tiles in n, tiles in k, SCALES / 2, TILE_N), each word two of them; with RECORD
    # (tiles in n, records of inputs, RECORD)
    params_ptr,
    channel_scale_ptr,  # (padded out_features,) float32 where GROUP is 0, or None
    bias_ptr,  # (padded out_features,) float32, or None
    sums_ptr,  # (groups, sums_stride) float32, of `group_sums_kernel`; or None, see `takes_sums`
    partial_ptr,  # (programs, BLOCK_N * BLOCK_M) float32 where inputs are split
    arrived_ptr,  # (programs / splits,) int32, zero before and after
    num_tokens,
    out_features,  # of the result; half of the weight's rows if there is an ACTIVATION
    in_features,
    x_stride,
    sums_stride,
    blocks_k,  # of BLOCK_K inputs
    CODES: tl.constexpr,
    AXES: tl.constexpr,
    TRELLIS: tl.constexpr,  # bits of a trellis's symbols; 0 for other codes
    WORDS: tl.constexpr,  # of a stored tile
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    OFFSETS: tl.constexpr,  # groups have them
    RECORD: tl.constexpr,  # words of a record of scales; 0: they lie apart
    GROUP: tl.constexpr,  # inputs whose product has a scale; 0: all
    SCALES: tl.constexpr,  # of a feature in a stored tile, applied to weights in registers
    FOLDED: tl.constexpr,  # inputs whose codes take scale and offset in registers; 0: none
    ACTIVATION: tl.constexpr,  # of `gated_rows`; None: all rows are said
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILEWISE: tl.constexpr,  # one product for each stored tile, else for each group
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # see `dependent_launch`
    ASM: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TILES_N: tl.constexpr = BLOCK_N // TILE_N
    # Inputs multiplied before a scale is applied: a group, or the two of one tile.
    PART_K: tl.constexpr = BLOCK_K if GROUP == 0 else max(GROUP, TILE_K)
    STEP_K: tl.constexpr = TILE_K if TILEWISE else PART_K
    TILES_K: tl.constexpr = STEP_K // TILE_K
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    i_tile = i_n * TILES_N
    tiles_k = blocks_k * (BLOCK_K // TILE_K)
    num_groups = 1
    if FOLDED != 0:
        num_groups = blocks_k * BLOCK_K // FOLDED
    elif GROUP != 0:
        num_groups = blocks_k * (BLOCK_K // GROUP)

    b_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_valid_m = b_m < num_tokens
    b_x_row = b_m.to(tl.int64) * x_stride
    b_existing_row = tl.minimum(b_m, num_tokens - 1).to(tl.int64) * x_stride
    b_words_at = (i_tile + tl.arange(0, TILES_N)).to(tl.int64)[:, None] * tiles_k * WORDS
    p_tiles = codes_ptr + b_words_at
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if EARLY:
        # The codes of the first blocks, one after another for each tile of features.
        BLOCK_WORDS: tl.constexpr = BLOCK_K // TILE_K * WORDS
        o_line = blocks_k * i_split // splits * BLOCK_WORDS + tl.arange(0, LINES) * LINE
        o_line = tl.minimum(o_line, blocks_k * BLOCK_WORDS - 1)
        prefetch_lines(p_tiles + o_line[None, :])
        wait_for_previous()

    # A number of stages here prefetches the scales too, not only the operands.
    for i_block in tl.range(
        blocks_k * i_split // splits, blocks_k * (i_split + 1) // splits, num_stages=STAGES
    ):
        if GROUP != 0 and GROUP < TILE_K:
            b_acc = add_tiles(
                b_acc, x_ptr, b_x_row, b_valid_m, p_tiles + i_block * (BLOCK_K // TILE_K * WORDS),
                params_ptr, sums_ptr, b_m, sums_stride, i_tile, i_block, blocks_k, in_features,
                OFFSETS, CODES, AXES, WORDS, TILE_K, PARAMS, RECORD, GROUP, EVEN_K, BLOCK_K, ASM,
            )  # fmt: skip
        elif FOLDED != 0 and (FOLDED < TILE_K or CODES != "int4"):
            b_acc = multiply_scaled(
                b_acc, x_ptr, b_existing_row, p_tiles + i_block * (BLOCK_K // TILE_K * WORDS),
                params_ptr, i_tile, i_block, blocks_k, in_features, OFFSETS, CODES, AXES, WORDS,
                TILE_K, PARAMS, RECORD, FOLDED, EVEN_K, BLOCK_K, ASM,
            )  # fmt: skip
        else:
            for i_part in tl.static_range(BLOCK_K // PART_K):
                start = i_block * BLOCK_K + i_part * PART_K
                b_product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if GROUP != 0 else b_acc
                for i_step in tl.static_range(PART_K // STEP_K):
                    at = start + i_step * STEP_K
                    if not TRELLIS:
                        o_word = tl.arange(0, TILES_K * WORDS)[None, :]
                        b_words = tl.load(p_tiles + o_word + at // TILE_K * WORDS)
                    b_x = load_x(x_ptr, b_x_row, b_valid_m, at, in_features, STEP_K, EVEN_K)
                    b_one, b_other = None, None
                    if PARAMS == "fp16_zero" and not FOLDED:
                        b_one, b_other = zero_points(
                            params_ptr, i_tile, num_groups, start // GROUP, b_words, TILES_N,
                            TILES_K, DTYPE, ASM,
                        )  # fmt: skip
                    if SCALES:
                        b_one, b_other = tile_scales(
                            params_ptr, i_tile, tiles_k, at // TILE_K, b_words, TILES_N, TILES_K,
                            SCALES, ASM,
                        )  # fmt: skip
                    if TRELLIS:
                        o_tile = (at // TILE_K + tl.arange(0, TILES_K)) * WORDS
                        b_weight = load_weights(
                            p_tiles + o_tile[None, :], AXES, BLOCK_N, STEP_K, TRELLIS, DTYPE, ASM
                        )
                    elif FOLDED:
                        b_one, b_first, b_other, b_second = scales_of_words(
                            params_ptr, i_tile, num_groups, at // FOLDED, b_words, TILES_N, TILES_K,
                            PARAMS,
                        )  # fmt: skip
                        b_weight = to_scaled_weights(
                            b_words, b_one, b_first, b_other, b_second, TILES_N, TILES_K, AXES,
                            BLOCK_N, STEP_K, DTYPE, ASM,
                        )  # fmt: skip
                    else:
                        b_weight = to_weights(
                            b_words, b_one, b_other, TILES_N, TILES_K, AXES, BLOCK_N, STEP_K, CODES,
                            DTYPE, ASM,
                        )  # fmt: skip
                    b_product = tl.dot(b_weight, b_x, b_product)
                if GROUP == 0:
                    b_acc = b_product
                else:
                    i_group = start // GROUP
                    b_scale, b_offset = load_scales(
                        params_ptr, i_tile, num_groups, i_group, TILES_N, PARAMS
                    )
                    b_acc = add_group(
                        b_acc, b_product, None, b_scale, b_offset, sums_ptr,
                        i_group * sums_stride + b_m,
                    )  # fmt: skip

    o_n = tl.arange(0, BLOCK_N)
    if splits > 1:
        i_out = i_n * tl.num_programs(0) + i_m
        if not leave_partial(b_acc, partial_ptr, arrived_ptr, i_out, i_split, splits):
            return
        b_acc = sum_partials(partial_ptr, arrived_ptr, i_out, splits, BLOCK_N, BLOCK_M)

    b_n = i_n * BLOCK_N + rows_of(o_n, TRELLIS)
    if channel_scale_ptr is not None:
        b_acc *= tl.load(channel_scale_ptr + b_n)[:, None]
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + b_n)[:, None]
    if ACTIVATION is not None:
        b_acc = gated_rows(b_acc, ACTIVATION, LIMIT, ALPHA)
        b_n = i_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    b_at = b_m.to(tl.int64)[None, :] * out_features + b_n[:, None]
    b_mask = b_valid_m[None, :] & (b_n < out_features)[:, None]
    tl.store(out_ptr + b_at, b_acc.to(DTYPE), mask=b_mask)


@triton.jit(do_not_specialize=["num_tokens"])
def group_sums_kernel(
    sums_ptr,  # (groups, padded tokens) float32
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    num_tokens,
    in_features,
    x_stride,
    sums_stride,
    num_groups,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        wait_for_previous()
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    b_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    b_group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    b_mask = (b_m < num_tokens)[:, None] & (b_k < in_features)[None, :]
    p_x = x_ptr + b_m.to(tl.int64)[:, None] * x_stride + b_k[None, :]
    b_x = tl.load(p_x, mask=b_mask, other=0.0).to(tl.float32)
    b_sums = tl.sum(tl.reshape(b_x, (BLOCK_M, GROUPS, GROUP)), 2)
    p_sums = sums_ptr + b_group[None, :] * sums_stride + b_m[:, None]
    tl.store(p_sums, b_sums, mask=(b_group < num_groups)[None, :] & (b_m < sums_stride)[:, None])


@triton.jit(do_not_specialize=["i_first_tile"])
def dequantize_kernel(
    out_ptr,  # (rows, in_features), from the first tile's first row on
    codes_ptr,
    params_ptr,
    channel_scale_ptr,
    i_first_tile,
    rows,
    in_features,
    blocks_k,
    CODES: tl.constexpr,
    AXES: tl.constexpr,
    TRELLIS: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    TILES_K: tl.constexpr = BLOCK_K // TILE_K
    i_tile, i_block = tl.program_id(0), tl.program_id(1)
    i_from = i_first_tile + i_tile
    p_words = codes_ptr + (i_from.to(tl.int64) * blocks_k + i_block) * (TILES_K * WORDS)
    if TRELLIS:
        p_tile = p_words + (tl.arange(0, TILES_K) * WORDS)[None, :]
        b_weight = load_weights(p_tile, AXES, TILE_N, BLOCK_K, TRELLIS, DTYPE, ASM)
    else:
        b_words = tl.load(p_words + tl.arange(0, TILES_K * WORDS))
        b_one, b_other = None, None
        if SCALES:
            b_words = b_words[None, :]
            b_one, b_other = tile_scales(
                params_ptr, i_from, blocks_k * TILES_K, i_block * TILES_K, b_words, 1, TILES_K,
                SCALES, ASM,
            )  # fmt: skip
        b_weight = to_weights(
            b_words, b_one, b_other, 1, TILES_K, AXES, TILE_N, BLOCK_K, CODES, DTYPE, ASM
        )
    b_weight = b_weight.to(tl.float32)
    o_n = rows_of(tl.arange(0, TILE_N), TRELLIS)
    if GROUP == 0:
        b_weight *= tl.load(channel_scale_ptr + i_from * TILE_N + o_n)[:, None]
    else:
        GROUPS: tl.constexpr = BLOCK_K // GROUP
        # Place each column of scales in its group.
        b_weight = tl.reshape(b_weight, (TILE_N, GROUPS, GROUP))
        o_group = tl.arange(0, GROUPS)
        b_scale = tl.zeros((TILE_N, GROUPS), tl.float32)
        b_offset = tl.zeros((TILE_N, GROUPS), tl.float32)
        for i in tl.static_range(GROUPS):
            b_one, b_other = load_scales(
                params_ptr, i_from, blocks_k * GROUPS, i_block * GROUPS + i, 1, PARAMS
            )
            b_here = (o_group == i)[None, :]
            b_scale = tl.where(b_here, b_one[:, None], b_scale)
            b_offset = tl.where(b_here, b_other[:, None], b_offset)
        b_weight = b_weight * b_scale[:, :, None] + b_offset[:, :, None]
        b_weight = tl.reshape(b_weight, (TILE_N, BLOCK_K))
    b_row = i_tile * TILE_N + o_n
    b_k = i_block * BLOCK_K + tl.arange(0, BLOCK_K)
    p_out = out_ptr + b_row.to(tl.int64)[:, None] * in_features + b_k[None, :]
    tl.store(p_out, b_weight.to(DTYPE), mask=(b_row < rows)[:, None] & (b_k < in_features)[None, :])


@triton.jit(do_not_specialize=["i_first", "num_rows"])
def rows_kernel(
    out_ptr,  # (num_rows, in_features)
    ids_ptr,  # (num_rows,) int64, rows of the weight; None for those from i_first on
    codes_ptr,  # as in `packed_matmul_kernel`
    params_ptr,
    i_first,
    num_rows,
    in_features,
    blocks_k,
    BITS: tl.constexpr,
    MIDDLE: tl.constexpr,  # the code that stands for 0; None if codes name values
    CODES: tl.constexpr,  # those; else None
    WORDS: tl.constexpr,
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write some inputs of some rows of a weight with records, exact before they are rounded."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    i_block = tl.program_id(1)
    b_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    b_valid = b_m < num_rows
    b_row = b_m + i_first
    if ids_ptr is not None:
        b_row = tl.load(ids_ptr + b_m, mask=b_valid, other=0).to(tl.int32)
    o_k = tl.arange(0, BLOCK_K)
    b_tile = (b_row // TILE_N).to(tl.int64)[:, None] * (blocks_k * (BLOCK_K // TILE_K))
    b_tile = b_tile + (i_block * (BLOCK_K // TILE_K) + o_k // TILE_K)[None, :]
    b_n, b_k = (b_row % TILE_N)[:, None], (o_k % TILE_K)[None, :]
    b_code = code_of(codes_ptr + b_tile * WORDS, b_n, b_k, BITS)
    b_value = named_value(b_code, CODES) if MIDDLE is None else b_code - MIDDLE
    b_0, b_1, b_2, b_3 = load_record(params_ptr, b_row, 0, i_block, blocks_k, RECORD, PARAMS)
    b_scale = tl.zeros((BLOCK_M, GROUPS), tl.float32)
    b_offset = tl.zeros((BLOCK_M, GROUPS), tl.float32)
    for i in tl.static_range(GROUPS):
        b_one, b_other = record_scales(b_0, b_1, b_2, b_3, i, 0, PARAMS)
        b_here = (tl.arange(0, GROUPS) == i)[None, :]
        b_scale = tl.where(b_here, b_one[:, None], b_scale)
        b_offset = tl.where(b_here, b_other[:, None], b_offset)
    b_value = tl.reshape(b_value.to(tl.float32), (BLOCK_M, GROUPS, GROUP))
    b_value = tl.reshape(b_value * b_scale[:, :, None] + b_offset[:, :, None], (BLOCK_M, BLOCK_K))
    b_k = i_block * BLOCK_K + o_k
    tl.store(
        out_ptr + b_m.to(tl.int64)[:, None] * in_features + b_k[None, :],
        b_value.to(out_ptr.dtype.element_ty),
        mask=b_valid[:, None] & (b_k < in_features)[None, :],
    )
