"""Products of weights that take the scales of short groups in registers, on the GPU.

All products add to one sum, so a tile of many rows of x has registers for them. The weights are
rounded to the dtype of activations, as dense weights are.
"""

import triton
import triton.language as tl

from appliance.kernels.device.code_planes import join_eight, load_plane, widen_planes
from appliance.kernels.device.group_products import load_params
from appliance.kernels.device.scale_records import load_record, record_scales
from appliance.kernels.weight_codes import ptx
from appliance.kernels.weight_codes.kernel import (
    ROWS_APART,
    as_operand,
    widen_bytes,
    widen_int4,
)

INT2_BF16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("bf16", 2))
INT2_FP16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("f16", 2))
INT3_BF16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("bf16", 2, 1))
INT3_FP16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("f16", 2, 1))
INT4_BF16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("bf16", 4))
INT4_FP16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("f16", 4))
INT5_BF16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("bf16", 4, 1))
INT5_FP16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("f16", 4, 1))
INT6_BF16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("bf16", 4, 2))
INT6_FP16: tl.constexpr = tl.constexpr(ptx.scaled_pairs("f16", 4, 2))
LANES: tl.constexpr = tl.constexpr(128)  # of all warps that share a tile
SIDE: tl.constexpr = tl.constexpr(64)  # output features of a tile


@triton.jit
def multiply_scaled(
    b_acc,  # (BLOCK_N, BLOCK_M)
    x_ptr,
    b_x_row,  # of rows that exist, so that no mask takes registers
    p_tile,  # (tiles in n, 1) pointers to the words of the block's first tiles
    params_ptr,
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
    GROUP: tl.constexpr,  # inputs that share a scale: a tile, a half or a quarter of it
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """Add the product of a block of inputs, a stored tile at a time."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK_N: tl.constexpr = b_acc.shape[0]
    TILES_N: tl.constexpr = BLOCK_N // SIDE
    GROUPS: tl.constexpr = TILE_K // GROUP
    # The bits that all codes have; those above them follow.
    FIRST: tl.constexpr = 512 if WORDS >= 512 else 256
    o_lane = tl.arange(0, LANES)
    o_row = o_lane // 32 * 16 + o_lane % 32 // 4  # the first of a lane's two features
    b_row = (tl.arange(0, TILES_N) * SIDE)[:, None] + o_row[None, :]
    b_record, b_other = None, None
    if RECORD:
        b_record = load_record(params_ptr, b_row, i_tile, i_block, blocks_k, RECORD, PARAMS)
        b_other = load_record(
            params_ptr + ROWS_APART, b_row, i_tile, i_block, blocks_k, RECORD, PARAMS
        )
    for i_part in tl.static_range(BLOCK_K // TILE_K):
        b_words = load_plane(p_tile + i_part * WORDS, FIRST)
        b_upper = None
        if WORDS > FIRST:
            b_upper = load_plane(p_tile + (i_part * WORDS + FIRST), WORDS - FIRST)
        at = i_block * BLOCK_K + i_part * TILE_K
        o_k = at + tl.arange(0, TILE_K)
        p_x = x_ptr + b_x_row[None, :] + o_k[:, None]
        b_x = tl.load(p_x) if EVEN_K else tl.load(p_x, mask=(o_k < in_features)[:, None], other=0.0)
        b_scale, b_offset = lane_scales(
            b_record, params_ptr, b_row, i_tile, i_block, blocks_k, i_part * GROUPS,
            BLOCK_K // GROUP, GROUPS, PARAMS, RECORD,
        )  # fmt: skip
        b_more_scale, b_more_offset = lane_scales(
            b_other, params_ptr + ROWS_APART, b_row, i_tile, i_block, blocks_k, i_part * GROUPS,
            BLOCK_K // GROUP, GROUPS, PARAMS, RECORD,
        )  # fmt: skip
        if CODES == "int8":
            b_words = tl.reshape(b_words, (TILES_N, LANES, 4))
            b_planes = widen_bytes(b_words, CODES, DTYPE, ASM).to(tl.float32)
            # A word has one feature: the first in even words, the second in odd ones.
            b_odd = (tl.arange(0, 4) % 2 == 1)[None, None, :]
            b_scale = tl.where(b_odd, b_more_scale, b_scale)[:, :, :, None, None]
            b_offset = tl.where(b_odd, b_more_offset, b_offset)[:, :, :, None, None]
            b_planes = (b_planes * b_scale + b_offset).to(DTYPE)
        else:
            b_words = four_words(b_words, TILES_N)
            if b_upper is not None:
                b_upper = four_words(b_upper, TILES_N)
            b_planes = scaled_planes(
                b_words,
                b_upper,
                b_scale,
                b_offset,
                b_more_scale,
                b_more_offset,
                RECORD != 0 and OFFSETS,
                CODES,
                DTYPE,
                ASM,
            )
        b_weight = as_operand(b_planes, TILES_N, 1, AXES, BLOCK_N, TILE_K, ASM)
        b_acc = tl.dot(b_weight, b_x, b_acc)
    return b_acc


@triton.jit
def lane_scales(
    b_record,  # of `load_record` for these features, or None
    params_ptr,
    b_row,  # (tiles in n, lanes) features
    i_tile,
    i_block,
    blocks_k,
    PLACE: tl.constexpr,  # of the tile's first group in the block
    EACH: tl.constexpr,  # groups of a block
    GROUPS: tl.constexpr,  # of a tile: 1, 2 or 4
    PARAMS: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Return scale and offset of one of a lane's features for its four words of a tile."""
    TILES_N: tl.constexpr = b_row.shape[0]
    if RECORD:
        b_0, b_1, b_2, b_3 = b_record
        b_scale, b_offset = record_scales(b_0, b_1, b_2, b_3, PLACE, 0, PARAMS)
        if GROUPS > 1:
            b_more, b_plus = record_scales(b_0, b_1, b_2, b_3, PLACE + 1, 0, PARAMS)
            b_scale, b_offset = tl.join(b_scale, b_more), tl.join(b_offset, b_plus)
        if GROUPS > 2:
            b_one, b_first = record_scales(b_0, b_1, b_2, b_3, PLACE + 2, 0, PARAMS)
            b_two, b_second = record_scales(b_0, b_1, b_2, b_3, PLACE + 3, 0, PARAMS)
            b_scale = tl.permute(tl.join(b_scale, tl.join(b_one, b_two)), (0, 1, 3, 2))
            b_offset = tl.permute(tl.join(b_offset, tl.join(b_first, b_second)), (0, 1, 3, 2))
    else:
        FEATURES: tl.constexpr = 2 * SIDE if PARAMS == "fp32_offset" else SIDE
        b_group = (i_tile + b_row // SIDE) * (blocks_k * EACH) + i_block * EACH + PLACE
        p_word = params_ptr + b_group * FEATURES + b_row % SIDE
        b_scale, b_offset = load_params(p_word, PARAMS)
        if GROUPS > 1:
            b_more, b_plus = load_params(p_word + FEATURES, PARAMS)
            b_scale, b_offset = tl.join(b_scale, b_more), tl.join(b_offset, b_plus)
    if GROUPS == 1:
        b_scale, b_offset = b_scale[:, :, None], b_offset[:, :, None]
    elif GROUPS == 2:
        b_scale = tl.broadcast_to(b_scale[:, :, :, None], (TILES_N, LANES, 2, 2))
        b_offset = tl.broadcast_to(b_offset[:, :, :, None], (TILES_N, LANES, 2, 2))
    if GROUPS == 1:
        return (
            tl.broadcast_to(b_scale, (TILES_N, LANES, 4)),
            tl.broadcast_to(b_offset, (TILES_N, LANES, 4)),
        )
    else:
        return (
            tl.reshape(b_scale, (TILES_N, LANES, 4)),
            tl.reshape(b_offset, (TILES_N, LANES, 4)),
        )


@triton.jit
def scaled_planes(
    b_words,  # (tiles in n, lanes, 4)
    b_upper,  # the bits above those, in as many words; or None
    b_scale,  # as b_words, float32, of the first of a word's two rows; and its offset
    b_offset,
    b_more_scale,  # of the second
    b_more_offset,
    FROM_ZERO: tl.constexpr,  # offsets belong to codes as they are, else less the middle one
    CODES: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Widen the eight codes of each word with scale and offset, as `widen_planes` without."""
    OTHER_BITS: tl.constexpr = 4 if CODES == "int4" else 5 if CODES == "int5" else 6
    BITS: tl.constexpr = 2 if CODES == "int2" else 3 if CODES == "int3" else OTHER_BITS
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    if not ASM or CODES[1] == "q":
        b_planes = to_planes(b_words, b_upper, CODES, DTYPE, ASM).to(tl.float32)
        b_scale = tl.join(b_scale, b_more_scale)[:, :, :, None, None, :]
        b_offset = tl.join(b_offset, b_more_offset)[:, :, :, None, None, :]
        if FROM_ZERO:
            b_offset += MIDDLE * b_scale
        return (b_planes * b_scale + b_offset).to(DTYPE)
    else:
        # What both codes of a pair are too large by, see `ptx.scaled_pairs`.
        BASE: tl.constexpr = 128.0 if FROM_ZERO else 128.0 + MIDDLE
        EXCESS: tl.constexpr = BASE + (0x4300 + ((1 << BITS) - 1) / 2) / 65536
        b_offset -= EXCESS * b_scale
        b_more_offset -= EXCESS * b_more_scale
        if b_upper is None and tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT2_BF16 if CODES == "int2" else INT4_BF16,
                "=h,=h,=h,=h,=h,=h,=h,=h,r,f,f,f,f",
                [b_words, b_scale, b_offset, b_more_scale, b_more_offset],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        elif b_upper is None:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT2_FP16 if CODES == "int2" else INT4_FP16,
                "=h,=h,=h,=h,=h,=h,=h,=h,r,f,f,f,f",
                [b_words, b_scale, b_offset, b_more_scale, b_more_offset],
                dtype=(tl.float16,) * 8,
                is_pure=True,
                pack=1,
            )
        elif tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT3_BF16 if CODES == "int3" else INT5_BF16 if CODES == "int5" else INT6_BF16,
                "=h,=h,=h,=h,=h,=h,=h,=h,r,r,f,f,f,f",
                [b_words, b_upper, b_scale, b_offset, b_more_scale, b_more_offset],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT3_FP16 if CODES == "int3" else INT5_FP16 if CODES == "int5" else INT6_FP16,
                "=h,=h,=h,=h,=h,=h,=h,=h,r,r,f,f,f,f",
                [b_words, b_upper, b_scale, b_offset, b_more_scale, b_more_offset],
                dtype=(tl.float16,) * 8,
                is_pure=True,
                pack=1,
            )
        return join_eight(a, b, c, d, e, f, g, h)


@triton.jit
def to_planes(b_words, b_upper, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    if CODES == "int4":
        return widen_int4(b_words, DTYPE, ASM)
    else:
        return widen_planes(b_words, b_upper, CODES, DTYPE, ASM)


@triton.jit
def four_words(b_words, TILES_N: tl.constexpr):
    """Return the words of some tiles' plane as those of nibbles: a lane's four, moved to bit 0."""
    if b_words.numel == TILES_N * LANES * 4:
        return tl.reshape(b_words, (TILES_N, LANES, 4))
    elif b_words.numel == TILES_N * LANES * 2:
        b_pair = tl.reshape(b_words, (TILES_N, LANES, 2))
        return tl.reshape(tl.join(b_pair, b_pair >> 8), (TILES_N, LANES, 4))
    else:
        b_lane = tl.reshape(b_words, (TILES_N, LANES))
        b_pair = tl.join(b_lane, b_lane >> 8)
        return tl.reshape(tl.join(b_pair, b_pair >> 4), (TILES_N, LANES, 4))
