"""Packed matmul on the GPU: out.T = weight @ x.T, codes widened in registers, float32 sums.

The weight is operand A of the tensor cores, so few rows of x cost little. Its codes lie in memory
in the order of A's fragments: threads load 16 bytes each, and widened codes never pass through
shared memory. Each group has a product of its own, whose sum takes the group's scale.
"""

import triton
import triton.language as tl

from appliance.kernels.weight_codes.kernel import tile_scales, to_weights, zero_points

TILE_N: tl.constexpr = tl.constexpr(64)
INT4_CENTER: tl.constexpr = tl.constexpr(8)
LARGE: tl.constexpr = tl.constexpr(80.0)  # an exponent within float32


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


@triton.jit
def load_scales(
    params_ptr, i_tile, num_groups, i_group, TILES_N: tl.constexpr, PARAMS: tl.constexpr
):
    """Return scale and offset of a group for each output feature, (BLOCK_N,) float32 each."""
    o_n = tl.arange(0, TILES_N * TILE_N)
    b_row = (i_tile + o_n // TILE_N) * num_groups + i_group
    if PARAMS == "fp16_offset":  # halves of one word
        b_word = tl.load(params_ptr + b_row * TILE_N + o_n % TILE_N)
        b_scale = (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_offset = (b_word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PARAMS == "fp16_zero":
        b_word = tl.load(params_ptr + b_row * TILE_N + o_n % TILE_N)
        b_scale = (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_offset = -b_scale * ((b_word >> 16) - INT4_CENTER).to(tl.float32)
    elif PARAMS == "fp32_offset":
        b_place = b_row * (2 * TILE_N) + o_n % TILE_N
        b_scale = tl.load(params_ptr + b_place).to(tl.float32, bitcast=True)
        b_offset = tl.load(params_ptr + b_place + TILE_N).to(tl.float32, bitcast=True)
    else:
        b_word = tl.load(params_ptr + b_row * TILE_N + o_n % TILE_N)
        b_scale = b_word.to(tl.float32, bitcast=True)
        b_offset = tl.zeros_like(b_scale)
    return b_scale, b_offset


@triton.jit
def load_x(x_ptr, b_row, b_valid, start, in_features, SIDE_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load a part of x, transposed: (SIDE_K, BLOCK_M), zero where masked."""
    o_k = tl.arange(0, SIDE_K)
    b_mask = b_valid[None, :]
    if not EVEN_K:
        b_mask = b_mask & (start + o_k < in_features)[:, None]
    return tl.load(x_ptr + b_row[None, :] + (start + o_k)[:, None], mask=b_mask, other=0.0)


@triton.jit
def add_group(
    b_acc,
    b_product,  # with the group's codes
    b_sums,  # sums of x over the group, in the product's shape; or None
    params_ptr,
    sums_ptr,  # (groups, padded tokens) float32, the same sums where b_sums is None; or None
    i_tile,
    i_group,
    num_groups,
    b_sums_at,
    TILES_N: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Add a group's product, scaled and offset."""
    b_scale, b_offset = load_scales(params_ptr, i_tile, num_groups, i_group, TILES_N, PARAMS)
    b_acc += b_product * b_scale[:, None]
    if b_sums is not None:
        b_acc += b_sums * b_offset[:, None]
    elif sums_ptr is not None:
        b_acc += tl.load(sums_ptr + b_sums_at)[None, :] * b_offset[:, None]
    return b_acc


@triton.jit(do_not_specialize=["num_tokens"])
def packed_matmul_kernel(
    out_ptr,  # (num_tokens, out_features)
    x_ptr,  # (num_tokens, in_features), rows x_stride apart
    codes_ptr,  # (tiles in n, tiles in k, words) int32
    # (tiles in n, groups, [2,] TILE_N) int32, the bits of scales and offsets; with SCALES
    # (tiles in n, tiles in k, SCALES / 2, TILE_N), each word two of them
    params_ptr,
    channel_scale_ptr,  # (padded out_features,) float32 where GROUP is 0, or None
    bias_ptr,  # (padded out_features,) float32, or None
    sums_ptr,
    partial_ptr,  # (programs, BLOCK_N * BLOCK_M) float32 where inputs are split
    arrived_ptr,  # (programs / splits,) int32, zero before and after
    num_tokens,
    out_features,  # of the result; half of the weight's rows if GATED
    in_features,
    x_stride,
    sums_stride,
    blocks_k,  # of BLOCK_K inputs
    CODES: tl.constexpr,
    AXES: tl.constexpr,
    WORDS: tl.constexpr,  # of a stored tile
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs whose product has a scale; 0: all
    SCALES: tl.constexpr,  # of a feature in a stored tile, applied to weights in registers
    SUMS: tl.constexpr,  # take the sums of x from sums_ptr, else from a product with ones
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILEWISE: tl.constexpr,  # one product for each stored tile, else for each group
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TILES_N: tl.constexpr = BLOCK_N // TILE_N
    HAS_OFFSET: tl.constexpr = PARAMS == "fp16_offset" or PARAMS == "fp32_offset"
    ONES: tl.constexpr = HAS_OFFSET and not SUMS
    # Inputs multiplied before a scale is applied: a group, or the two of one tile.
    PART_K: tl.constexpr = BLOCK_K if GROUP == 0 else max(GROUP, TILE_K)
    STEP_K: tl.constexpr = TILE_K if TILEWISE else PART_K
    TILES_K: tl.constexpr = STEP_K // TILE_K
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    i_tile = i_n * TILES_N
    tiles_k = blocks_k * (BLOCK_K // TILE_K)
    num_groups = 1 if GROUP == 0 else blocks_k * (BLOCK_K // GROUP)

    b_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    b_valid_m = b_m < num_tokens
    b_x_row = b_m.to(tl.int64) * x_stride
    o_word = tl.arange(0, TILES_K * WORDS)
    b_words_at = (i_tile + tl.arange(0, TILES_N)).to(tl.int64)[:, None] * tiles_k * WORDS
    p_words = codes_ptr + b_words_at + o_word[None, :]
    b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    # A number of stages here prefetches the scales too, not only the operands.
    for i_block in tl.range(
        blocks_k * i_split // splits, blocks_k * (i_split + 1) // splits, num_stages=STAGES
    ):
        for i_part in tl.static_range(BLOCK_K // PART_K):
            start = i_block * BLOCK_K + i_part * PART_K
            if GROUP != 0 and GROUP < TILE_K:
                # The four words of a lane: two for each group.
                b_words = tl.load(p_words + start // TILE_K * WORDS)
                b_pairs = tl.reshape(b_words, (TILES_N * WORDS // 4, 2, 2))
                b_first, b_second = tl.split(tl.permute(b_pairs, (0, 2, 1)))
                for i_half in tl.static_range(2):
                    at = start + i_half * GROUP
                    b_x = load_x(x_ptr, b_x_row, b_valid_m, at, in_features, GROUP, EVEN_K)
                    b_half = b_first if i_half == 0 else b_second
                    b_one, b_other = None, None
                    if PARAMS == "fp16_zero":
                        b_one, b_other = zero_points(
                            params_ptr, i_tile, num_groups, at // GROUP, b_half, TILES_N, 1,
                            DTYPE, ASM,
                        )  # fmt: skip
                    b_weight = to_weights(
                        b_half, b_one, b_other, TILES_N, 1, AXES, BLOCK_N, GROUP, CODES, DTYPE, ASM
                    )
                    b_product = tl.dot(b_weight, b_x)
                    b_sums = None
                    if ONES:
                        b_sums = tl.dot(tl.full((BLOCK_N, GROUP), 1.0, tl.float32).to(DTYPE), b_x)
                    b_acc = add_group(
                        b_acc, b_product, b_sums, params_ptr, sums_ptr, i_tile, at // GROUP,
                        num_groups, at // GROUP * sums_stride + b_m, TILES_N, PARAMS,
                    )  # fmt: skip
            else:
                b_product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if GROUP != 0 else b_acc
                b_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if ONES else None
                for i_step in tl.static_range(PART_K // STEP_K):
                    at = start + i_step * STEP_K
                    b_words = tl.load(p_words + at // TILE_K * WORDS)
                    b_x = load_x(x_ptr, b_x_row, b_valid_m, at, in_features, STEP_K, EVEN_K)
                    b_one, b_other = None, None
                    if PARAMS == "fp16_zero":
                        b_one, b_other = zero_points(
                            params_ptr, i_tile, num_groups, start // GROUP, b_words, TILES_N,
                            TILES_K, DTYPE, ASM,
                        )  # fmt: skip
                    if SCALES:
                        b_one, b_other = tile_scales(
                            params_ptr, i_tile, tiles_k, at // TILE_K, b_words, TILES_N, TILES_K,
                            SCALES, ASM,
                        )  # fmt: skip
                    b_weight = to_weights(
                        b_words, b_one, b_other, TILES_N, TILES_K, AXES, BLOCK_N, STEP_K, CODES,
                        DTYPE, ASM,
                    )  # fmt: skip
                    b_product = tl.dot(b_weight, b_x, b_product)
                    if ONES:
                        # The sum of x, the same in all rows, if it is needed.
                        b_ones = tl.full((BLOCK_N, STEP_K), 1.0, tl.float32).to(DTYPE)
                        b_sums = tl.dot(b_ones, b_x, b_sums)
                if GROUP == 0:
                    b_acc = b_product
                else:
                    b_acc = add_group(
                        b_acc, b_product, b_sums, params_ptr, sums_ptr, i_tile, start // GROUP,
                        num_groups, start // GROUP * sums_stride + b_m, TILES_N, PARAMS,
                    )  # fmt: skip

    o_n = tl.arange(0, BLOCK_N)
    if splits > 1:
        i_out = i_n * tl.num_programs(0) + i_m
        if not leave_partial(b_acc, partial_ptr, arrived_ptr, i_out, i_split, splits):
            return
        b_acc = sum_partials(partial_ptr, arrived_ptr, i_out, splits, BLOCK_N, BLOCK_M)

    b_n = i_n * BLOCK_N + o_n
    if channel_scale_ptr is not None:
        b_acc *= tl.load(channel_scale_ptr + b_n)[:, None]
    if bias_ptr is not None:
        b_acc += tl.load(bias_ptr + b_n)[:, None]
    if GATED:
        # 8 rows of gate, then their 8 rows of up: a thread has both.
        b_pairs = tl.reshape(b_acc, (BLOCK_N // 16, 2, 8, BLOCK_M))
        b_gate, b_up = tl.split(tl.permute(b_pairs, (0, 2, 3, 1)))
        b_gate = tl.reshape(b_gate, (BLOCK_N // 2, BLOCK_M))
        b_up = tl.reshape(b_up, (BLOCK_N // 2, BLOCK_M))
        b_acc = b_gate / (1.0 + tl.exp(tl.minimum(-b_gate, LARGE))) * b_up
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
):
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
    b_words = tl.load(p_words + tl.arange(0, TILES_K * WORDS))
    b_one, b_other = None, None
    if SCALES:
        b_words = b_words[None, :]
        b_one, b_other = tile_scales(
            params_ptr, i_from, blocks_k * TILES_K, i_block * TILES_K, b_words, 1, TILES_K, SCALES,
            ASM,
        )  # fmt: skip
    b_weight = to_weights(
        b_words, b_one, b_other, 1, TILES_K, AXES, TILE_N, BLOCK_K, CODES, DTYPE, ASM
    )
    b_weight = b_weight.to(tl.float32)
    o_n = tl.arange(0, TILE_N)
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
