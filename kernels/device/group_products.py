"""Products of groups of inputs on the GPU, each with a scale of its own.

Shared by the kernels that multiply packed weights.
"""

import triton
import triton.language as tl

from appliance.kernels.device.code_planes import load_plane, words_of_group
from appliance.kernels.device.scale_records import load_record, record_scales
from appliance.kernels.weight_codes.kernel import (
    ROWS_APART,
    first_rows,
    for_words,
    to_weights,
    zero_points,
)

TILE_N: tl.constexpr = tl.constexpr(64)
INT4_CENTER: tl.constexpr = tl.constexpr(8.0)


@triton.jit
def load_params(p_word, PARAMS: tl.constexpr):
    """Return scale and offset, float32 each, of the features whose words pointers point to."""
    b_word = tl.load(p_word)
    if PARAMS == "fp16_offset":  # halves of one word
        b_scale = (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        b_offset = (b_word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PARAMS == "fp16_zero":
        b_scale = (b_word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        # In the mantissa of 2^23 an integer needs no conversion.
        b_zero = ((b_word >> 16) | 0x4B000000).to(tl.float32, bitcast=True)
        b_offset = b_scale * (8388608.0 + INT4_CENTER - b_zero)
    elif PARAMS == "fp32_offset":
        b_scale = b_word.to(tl.float32, bitcast=True)
        b_offset = tl.load(p_word + TILE_N).to(tl.float32, bitcast=True)
    else:
        b_scale = b_word.to(tl.float32, bitcast=True)
        b_offset = tl.zeros_like(b_scale)
    return b_scale, b_offset


@triton.jit
def load_scales(
    params_ptr, i_tile, num_groups, i_group, TILES_N: tl.constexpr, PARAMS: tl.constexpr
):
    """Return scale and offset of a group for each output feature, (BLOCK_N,) float32 each."""
    o_n = tl.arange(0, TILES_N * TILE_N)
    b_row = (i_tile + o_n // TILE_N) * num_groups + i_group
    WORDS: tl.constexpr = 2 * TILE_N if PARAMS == "fp32_offset" else TILE_N
    return load_params(params_ptr + b_row * WORDS + o_n % TILE_N, PARAMS)


@triton.jit
def scales_of_words(
    params_ptr,
    i_tile,
    num_groups,
    i_group,
    b_words,
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Return a group's scale and offset for the first row of each word, then for the second."""
    WORDS: tl.constexpr = 2 * TILE_N if PARAMS == "fp32_offset" else TILE_N
    b_group = (i_tile + tl.arange(0, TILES_N)) * num_groups + i_group
    p_first = first_rows(params_ptr + (b_group * WORDS)[:, None])
    b_scale, b_offset = load_params(p_first, PARAMS)
    b_more_scale, b_more_offset = load_params(p_first + ROWS_APART, PARAMS)
    return (
        for_words(b_scale[:, :, :, None], b_words, TILES_K),
        for_words(b_offset[:, :, :, None], b_words, TILES_K),
        for_words(b_more_scale[:, :, :, None], b_words, TILES_K),
        for_words(b_more_offset[:, :, :, None], b_words, TILES_K),
    )


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
    b_scale,
    b_offset,
    sums_ptr,  # (groups, padded tokens) float32, the same sums where b_sums is None; or None
    b_sums_at,
):
    """Add a group's product, scaled and offset."""
    b_acc += b_product * b_scale[:, None]
    if b_sums is not None:
        b_acc += b_sums * b_offset[:, None]
    elif sums_ptr is not None:
        b_acc += tl.load(sums_ptr + b_sums_at)[None, :] * b_offset[:, None]
    return b_acc


@triton.jit
def add_tiles(
    b_acc,  # (BLOCK_N, BLOCK_M)
    x_ptr,
    b_x_row,
    b_valid_m,
    p_tile,  # (tiles in n, 1) pointers to the words of the block's first tiles
    params_ptr,
    sums_ptr,  # of `add_group`
    b_sums_at,
    sums_stride,
    i_tile,
    i_block,
    blocks_k,
    in_features,
    OFFSETS: tl.constexpr,
    CODES: tl.constexpr,
    AXES: tl.constexpr,
    WORDS: tl.constexpr,
    TILE_K: tl.constexpr,
    PARAMS: tl.constexpr,
    RECORD: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the products of a block of inputs whose stored tiles have 2 or 4 groups each."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK_N: tl.constexpr = b_acc.shape[0]
    TILES_N: tl.constexpr = BLOCK_N // TILE_N
    GROUPS: tl.constexpr = TILE_K // GROUP
    # The bits that all codes have; those above them follow.
    FIRST: tl.constexpr = 512 if WORDS >= 512 else 256
    MIDDLE: tl.constexpr = 2 if CODES == "int2" else 8 if CODES == "int4" else 16
    num_groups = blocks_k * (BLOCK_K // GROUP)
    b_record = None
    if RECORD:
        o_n = tl.arange(0, BLOCK_N)
        b_record = load_record(params_ptr, o_n, i_tile, i_block, blocks_k, RECORD, PARAMS)
    for i_part in tl.static_range(BLOCK_K // TILE_K):
        b_words = load_plane(p_tile + i_part * WORDS, FIRST)
        b_upper = None
        if WORDS > FIRST:
            b_upper = load_plane(p_tile + (i_part * WORDS + FIRST), WORDS - FIRST)
        for i_group in tl.static_range(GROUPS):
            at = i_block * BLOCK_K + i_part * TILE_K + i_group * GROUP
            b_x = load_x(x_ptr, b_x_row, b_valid_m, at, in_features, GROUP, EVEN_K)
            b_some = words_of_group(b_words, TILES_N, i_group, GROUPS)
            b_one, b_other = None, None
            if PARAMS == "fp16_zero":
                b_one, b_other = zero_points(
                    params_ptr, i_tile, num_groups, at // GROUP, b_some, TILES_N, 1, DTYPE, ASM
                )
            if b_upper is not None:
                b_one = words_of_group(b_upper, TILES_N, i_group, GROUPS)
            b_weight = to_weights(
                b_some, b_one, b_other, TILES_N, 1, AXES, BLOCK_N, GROUP, CODES, DTYPE, ASM
            )
            b_product = tl.dot(b_weight, b_x)
            b_sums = None
            if OFFSETS and sums_ptr is None:
                b_sums = tl.dot(tl.full((BLOCK_N, GROUP), 1.0, tl.float32).to(DTYPE), b_x)
            if RECORD:
                b_0, b_1, b_2, b_3 = b_record
                b_scale, b_offset = record_scales(
                    b_0, b_1, b_2, b_3, i_part * GROUPS + i_group, MIDDLE if OFFSETS else 0, PARAMS
                )
            else:
                b_scale, b_offset = load_scales(
                    params_ptr, i_tile, num_groups, at // GROUP, TILES_N, PARAMS
                )
            b_acc = add_group(
                b_acc, b_product, b_sums, b_scale, b_offset, sums_ptr,
                at // GROUP * sums_stride + b_sums_at,
            )  # fmt: skip
    return b_acc
