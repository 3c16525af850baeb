"""Widens words of packed codes to weights in registers, in the layout of the tensor cores.

`ASM` chooses between PTX and its twin in plain operations, which the interpreter runs.
"""

import triton
import triton.language as tl

from appliance.kernels.device.code_planes import join_eight, widen_planes
from appliance.kernels.weight_codes import ptx

INT4_BF16: tl.constexpr = tl.constexpr(ptx.INT4_BF16)
INT4_FP16: tl.constexpr = tl.constexpr(ptx.INT4_FP16)
INT8_BF16: tl.constexpr = tl.constexpr(ptx.INT8_BF16)
INT8_FP16: tl.constexpr = tl.constexpr(ptx.INT8_FP16)
FP8_BF16: tl.constexpr = tl.constexpr(ptx.FP8_BF16)
FP8_FP16: tl.constexpr = tl.constexpr(ptx.FP8_FP16)
INT4_ZERO_BF16: tl.constexpr = tl.constexpr(ptx.INT4_ZERO_BF16)
INT4_ZERO_FP16: tl.constexpr = tl.constexpr(ptx.INT4_ZERO_FP16)
INT4_SCALED_BF16: tl.constexpr = tl.constexpr(ptx.INT4_SCALED_BF16)
INT4_SCALED_FP16: tl.constexpr = tl.constexpr(ptx.INT4_SCALED_FP16)
ZERO_BF16: tl.constexpr = tl.constexpr(ptx.ZERO_BF16)
ZERO_FP16: tl.constexpr = tl.constexpr(ptx.ZERO_FP16)
FP4_BF16: tl.constexpr = tl.constexpr(ptx.FP4_BF16)
FP4_FP16: tl.constexpr = tl.constexpr(ptx.FP4_FP16)
LOW_TWICE: tl.constexpr = tl.constexpr(ptx.LOW_TWICE)
HIGH_TWICE: tl.constexpr = tl.constexpr(ptx.HIGH_TWICE)
LANES: tl.constexpr = tl.constexpr(128)  # of all warps that share a tile
SIDE: tl.constexpr = tl.constexpr(64)  # output features of a tile
ROWS_APART: tl.constexpr = tl.constexpr(8)  # the two rows of a word of 4-bit codes


@triton.jit
def first_rows(p_tile):
    """Return a pointer for the first of each lane's two output features in a word of 4-bit codes.

    The second is ROWS_APART words behind it.

    Args:
        p_tile: (tiles in n, tiles in k) pointers to words, one for each feature of a tile.
    """
    o_lane = tl.arange(0, LANES)
    return p_tile[:, :, None] + (o_lane // 32 * 16 + o_lane % 32 // 4)[None, None, :]


@triton.jit
def load_rows(p_tile):
    """Load a word for each of a lane's two output features."""
    p_first = first_rows(p_tile)
    return tl.load(p_first), tl.load(p_first + ROWS_APART)


@triton.jit
def in_both_halves(b_word, HIGH: tl.constexpr, ASM: tl.constexpr):
    """Return one half of each word, twice."""
    if ASM:
        return tl.inline_asm_elementwise(
            HIGH_TWICE if HIGH else LOW_TWICE, "=r,r", [b_word], tl.int32, is_pure=True, pack=1
        )
    else:
        b_half = (b_word >> 16) & 0xFFFF if HIGH else b_word & 0xFFFF
        return b_half | (b_half << 16)


@triton.jit
def minus_zero_points(b_word, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the addend that removes zero points from codes, from words of scale and zero."""
    if ASM:
        return tl.inline_asm_elementwise(
            ZERO_BF16 if tl.bfloat16 == DTYPE else ZERO_FP16,
            "=r,r",
            [b_word],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return (b_word >> 16) & 0xFFFF


@triton.jit
def for_words(b_row, b_words, TILES_K: tl.constexpr):
    """Arrange (tiles in n, 1 or tiles in k, lanes, 1 or a lane's words) as the words of tiles."""
    WORDS: tl.constexpr = b_words.numel // (b_row.shape[0] * TILES_K * LANES)
    b_wide = tl.broadcast_to(b_row, (b_row.shape[0], TILES_K, LANES, WORDS))
    return tl.reshape(b_wide, b_words.shape)


@triton.jit
def zero_points(
    params_ptr,
    i_tile,
    num_groups,
    i_group,
    b_words,
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the numbers of `widen_by_row` for one group's words."""
    b_row = (i_tile + tl.arange(0, TILES_N)) * num_groups + i_group
    b_one, b_other = load_rows(params_ptr + (b_row * SIDE)[:, None])
    b_one = minus_zero_points(b_one, DTYPE, ASM)[:, :, :, None]
    b_other = minus_zero_points(b_other, DTYPE, ASM)[:, :, :, None]
    return for_words(b_one, b_words, TILES_K), for_words(b_other, b_words, TILES_K)


@triton.jit
def tile_scales(
    params_ptr,
    i_tile,
    tiles_k,
    i_tile_k,
    b_words,
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    SCALES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return the numbers of `widen_by_row` for some tiles: 2 or 4 scales for a tile's inputs."""
    b_tile = (i_tile + tl.arange(0, TILES_N))[:, None] * tiles_k
    b_tile = b_tile + (i_tile_k + tl.arange(0, TILES_K))[None, :]
    p_tile = params_ptr + b_tile * (SCALES // 2 * SIDE)
    b_one, b_other = load_rows(p_tile)
    b_one = tl.join(in_both_halves(b_one, False, ASM), in_both_halves(b_one, True, ASM))
    b_other = tl.join(in_both_halves(b_other, False, ASM), in_both_halves(b_other, True, ASM))
    if SCALES == 4:
        b_more, b_most = load_rows(p_tile + SIDE)
        b_more = tl.join(in_both_halves(b_more, False, ASM), in_both_halves(b_more, True, ASM))
        b_most = tl.join(in_both_halves(b_most, False, ASM), in_both_halves(b_most, True, ASM))
        # The first bit of a lane's word is the half of the tile, the second the half of that.
        b_one = tl.permute(tl.join(b_one, b_more), (0, 1, 2, 4, 3))
        b_other = tl.permute(tl.join(b_other, b_most), (0, 1, 2, 4, 3))
    else:
        b_one = tl.broadcast_to(b_one[:, :, :, :, None], (TILES_N, TILES_K, LANES, 2, 2))
        b_other = tl.broadcast_to(b_other[:, :, :, :, None], (TILES_N, TILES_K, LANES, 2, 2))
    return tl.reshape(b_one, b_words.shape), tl.reshape(b_other, b_words.shape)


@triton.jit
def int4_plane(b_words, b_zero, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    # A right shift of int32 extends the sign; the mask removes it.
    return (((b_words >> (4 * PLACE)) & 0xF) - b_zero).to(tl.float32).to(DTYPE)


@triton.jit
def fp4_plane(b_words, b_scale, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    b_code = (b_words >> (4 * PLACE)) & 0xF
    b_exponent = (b_code >> 1) & 3
    b_half = (b_code & 1).to(tl.float32) * 0.5
    b_normal = (1.0 + b_half) * tl.exp2((b_exponent - 1).to(tl.float32))
    b_size = tl.where(b_exponent > 0, b_normal, b_half)
    # The scales include powers that the bits of PTX's results lack.
    b_scale = (b_scale & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    b_scale *= 1.1754943508222875e-38 if tl.bfloat16 == DTYPE else 6.103515625e-05
    return (tl.where(b_code > 7, -b_size, b_size) * b_scale).to(DTYPE)


@triton.jit
def widen_by_row(
    b_words, b_first, b_second, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """Widen as `widen_int4`, with a number for each of the two output features of a word.

    "int4": `minus_zero_points`; "fp4": scales in both halves.
    """
    if ASM:
        if tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_ZERO_BF16 if CODES == "int4" else FP4_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
                [b_words, b_first, b_second], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_ZERO_FP16 if CODES == "int4" else FP4_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
                [b_words, b_first, b_second], dtype=(tl.float16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
    elif CODES == "int4":
        a = int4_plane(b_words, b_first, 0, DTYPE)
        b = int4_plane(b_words, b_first, 4, DTYPE)
        c = int4_plane(b_words, b_first, 1, DTYPE)
        d = int4_plane(b_words, b_first, 5, DTYPE)
        e = int4_plane(b_words, b_second, 2, DTYPE)
        f = int4_plane(b_words, b_second, 6, DTYPE)
        g = int4_plane(b_words, b_second, 3, DTYPE)
        h = int4_plane(b_words, b_second, 7, DTYPE)
    else:
        a = fp4_plane(b_words, b_first, 0, DTYPE)
        b = fp4_plane(b_words, b_first, 4, DTYPE)
        c = fp4_plane(b_words, b_first, 1, DTYPE)
        d = fp4_plane(b_words, b_first, 5, DTYPE)
        e = fp4_plane(b_words, b_second, 2, DTYPE)
        f = fp4_plane(b_words, b_second, 6, DTYPE)
        g = fp4_plane(b_words, b_second, 3, DTYPE)
        h = fp4_plane(b_words, b_second, 7, DTYPE)
    return join_eight(a, b, c, d, e, f, g, h)


@triton.jit
def widen_int4(b_words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Widen words to planes 0..7, in three new axes j0, j1, j2 of size 2."""
    if ASM:
        if tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r",
                [b_words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r",
                [b_words], dtype=(tl.float16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        a = int4_plane(b_words, 8, 0, DTYPE)
        b = int4_plane(b_words, 8, 4, DTYPE)
        c = int4_plane(b_words, 8, 1, DTYPE)
        d = int4_plane(b_words, 8, 5, DTYPE)
        e = int4_plane(b_words, 8, 2, DTYPE)
        f = int4_plane(b_words, 8, 6, DTYPE)
        g = int4_plane(b_words, 8, 3, DTYPE)
        h = int4_plane(b_words, 8, 7, DTYPE)
    return join_eight(a, b, c, d, e, f, g, h)


@triton.jit
def int8_plane(b_words, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    # Stored with the top bit flipped, as a signed byte.
    b_signed = ((b_words >> (8 * PLACE)) & 0xFF) ^ 0x80
    return (b_signed - 128).to(tl.float32).to(DTYPE)


@triton.jit
def fp8_plane(b_words, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    b_code = (b_words >> (8 * PLACE)) & 0xFF
    b_exponent = (b_code >> 3) & 15
    b_mantissa = (b_code & 7).to(tl.float32)
    b_normal = (8.0 + b_mantissa) * tl.exp2((b_exponent - 10).to(tl.float32))
    b_size = tl.where(b_exponent > 0, b_normal, b_mantissa * 0.001953125)
    return tl.where(b_code > 127, -b_size, b_size).to(DTYPE)


@triton.jit
def widen_bytes(b_words, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Widen words to planes 0..3, in two new axes j0, j1 of size 2."""
    if ASM:
        if tl.bfloat16 == DTYPE:
            a, b, c, d = tl.inline_asm_elementwise(
                INT8_BF16 if CODES == "int8" else FP8_BF16,
                "=h,=h,=h,=h,r",
                [b_words],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=1,
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                INT8_FP16 if CODES == "int8" else FP8_FP16,
                "=h,=h,=h,=h,r",
                [b_words],
                dtype=(tl.float16,) * 4,
                is_pure=True,
                pack=1,
            )
    elif CODES == "int8":
        a = int8_plane(b_words, 0, DTYPE)
        b = int8_plane(b_words, 2, DTYPE)
        c = int8_plane(b_words, 1, DTYPE)
        d = int8_plane(b_words, 3, DTYPE)
    else:
        a = fp8_plane(b_words, 0, DTYPE)
        b = fp8_plane(b_words, 2, DTYPE)
        c = fp8_plane(b_words, 1, DTYPE)
        d = fp8_plane(b_words, 3, DTYPE)
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def to_weights(
    b_words,  # (words,) int32, tiles one after another
    b_first,  # as b_words, numbers of `widen_by_row`, or the upper bits of `widen_planes`; or None
    b_second,
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    AXES: tl.constexpr,  # of order.py
    SIDE_N: tl.constexpr,
    SIDE_K: tl.constexpr,
    CODES: tl.constexpr,  # "int2" to "int6", "int8", "fp8", "fp4", or of `NAMED_TABLES`
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return weights (SIDE_N, SIDE_K) without their scales: q less the middle code, or its value.

    With numbers by row: q less the zero point, or e2m1 times its scale.
    """
    if b_second is not None:
        b_planes = widen_by_row(b_words, b_first, b_second, CODES, DTYPE, ASM)
    elif CODES == "int4":
        b_planes = widen_int4(b_words, DTYPE, ASM)
    elif CODES == "int8" or CODES == "fp8":
        b_planes = widen_bytes(b_words, CODES, DTYPE, ASM)
    else:
        b_planes = widen_planes(b_words, b_first, CODES, DTYPE, ASM)
    return as_operand(b_planes, TILES_N, TILES_K, AXES, SIDE_N, SIDE_K, ASM)


@triton.jit
def as_operand(
    b_planes,
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    AXES: tl.constexpr,
    SIDE_N: tl.constexpr,
    SIDE_K: tl.constexpr,
    ASM: tl.constexpr,
):
    """Arrange the planes of tiles' words as weights (SIDE_N, SIDE_K)."""
    # Two counts of tiles and 12 bits of an index, or 11 or 10 if the words were split.
    if len(AXES) == 14:
        b_bits = tl.reshape(b_planes, (TILES_N, TILES_K, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11], AXES[12], AXES[13],
        )  # fmt: skip
    elif len(AXES) == 13:
        b_bits = tl.reshape(b_planes, (TILES_N, TILES_K, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11], AXES[12],
        )  # fmt: skip
    else:
        b_bits = tl.reshape(b_planes, (TILES_N, TILES_K, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11],
        )  # fmt: skip
    b_weight = tl.reshape(b_bits, (SIDE_N, SIDE_K))
    if ASM:
        # No instruction: it hides the joins from the choice of the operand's layout, which would
        # give a lane four neighbours in k, where the fragments have two.
        b_weight = tl.inline_asm_elementwise(
            "", "=h,0", [b_weight], dtype=b_weight.dtype, is_pure=False, pack=1
        )
    return b_weight


@triton.jit
def scaled_plane(b_words, b_scale, b_offset, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    b_code = ((b_words >> (4 * PLACE)) & 0xF) - 8
    return (b_code.to(tl.float32) * b_scale + b_offset).to(DTYPE)


@triton.jit
def to_scaled_weights(
    b_words,  # as for `to_weights`, 4-bit codes
    b_scale,  # as b_words, float32, of the first of a word's two rows; and its offset
    b_offset,
    b_more_scale,  # of the second
    b_more_offset,
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    AXES: tl.constexpr,
    SIDE_N: tl.constexpr,
    SIDE_K: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return weights (SIDE_N, SIDE_K) with scale and offset: (q - 8) * scale + offset, rounded."""
    if ASM:
        if tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_SCALED_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,f,f,f,f",
                [b_words, b_scale, b_offset, b_more_scale, b_more_offset],
                dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_SCALED_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r,f,f,f,f",
                [b_words, b_scale, b_offset, b_more_scale, b_more_offset],
                dtype=(tl.float16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        a = scaled_plane(b_words, b_scale, b_offset, 0, DTYPE)
        b = scaled_plane(b_words, b_scale, b_offset, 4, DTYPE)
        c = scaled_plane(b_words, b_scale, b_offset, 1, DTYPE)
        d = scaled_plane(b_words, b_scale, b_offset, 5, DTYPE)
        e = scaled_plane(b_words, b_more_scale, b_more_offset, 2, DTYPE)
        f = scaled_plane(b_words, b_more_scale, b_more_offset, 6, DTYPE)
        g = scaled_plane(b_words, b_more_scale, b_more_offset, 3, DTYPE)
        h = scaled_plane(b_words, b_more_scale, b_more_offset, 7, DTYPE)
    b_planes = join_eight(a, b, c, d, e, f, g, h)
    return as_operand(b_planes, TILES_N, TILES_K, AXES, SIDE_N, SIDE_K, ASM)
