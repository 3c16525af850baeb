"""Words of packed codes to weights in registers, in the layout that tensor cores take.

`ASM` chooses between PTX and its twin in plain operations, which the interpreter runs.
"""

import triton
import triton.language as tl

from appliance.kernels.weight_codes import ptx

INT4_BF16: tl.constexpr = tl.constexpr(ptx.INT4_BF16)
INT4_FP16: tl.constexpr = tl.constexpr(ptx.INT4_FP16)
INT8_BF16: tl.constexpr = tl.constexpr(ptx.INT8_BF16)
INT8_FP16: tl.constexpr = tl.constexpr(ptx.INT8_FP16)
FP8_BF16: tl.constexpr = tl.constexpr(ptx.FP8_BF16)
FP8_FP16: tl.constexpr = tl.constexpr(ptx.FP8_FP16)


@triton.jit
def int4_plane(b_words, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    # A right shift of int32 keeps the sign, which the mask takes off.
    return (((b_words >> (4 * PLACE)) & 0xF) - 8).to(tl.float32).to(DTYPE)


@triton.jit
def widen_int4(b_words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words to planes 0..7, side by side in three new axes j0, j1, j2 of size 2."""
    if ASM:
        if tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_BF16,
                "=h,=h,=h,=h,=h,=h,=h,=h,r",
                [b_words],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                INT4_FP16,
                "=h,=h,=h,=h,=h,=h,=h,=h,r",
                [b_words],
                dtype=(tl.float16,) * 8,
                is_pure=True,
                pack=1,
            )
    else:
        a = int4_plane(b_words, 0, DTYPE)
        b = int4_plane(b_words, 4, DTYPE)
        c = int4_plane(b_words, 1, DTYPE)
        d = int4_plane(b_words, 5, DTYPE)
        e = int4_plane(b_words, 2, DTYPE)
        f = int4_plane(b_words, 6, DTYPE)
        g = int4_plane(b_words, 3, DTYPE)
        h = int4_plane(b_words, 7, DTYPE)
    b_low = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(b_low, tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def int8_plane(b_words, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    # Stored with the top bit flipped: the byte of a signed number.
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
    """Words to planes 0..3, side by side in two new axes j0, j1 of size 2."""
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
    TILES_N: tl.constexpr,
    TILES_K: tl.constexpr,
    AXES: tl.constexpr,  # of order.py
    SIDE_N: tl.constexpr,
    SIDE_K: tl.constexpr,
    CODES: tl.constexpr,  # "int4", "int8" or "fp8"
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Weights (SIDE_N, SIDE_K) without their scales: q - 8, q - 128 or the value of e4m3."""
    if CODES == "int4":
        b_planes = widen_int4(b_words, DTYPE, ASM)
    else:
        b_planes = widen_bytes(b_words, CODES, DTYPE, ASM)
    # Beside the two counts of tiles 12 bits of an index, or 11 where the words were split.
    if len(AXES) == 14:
        b_bits = tl.reshape(b_planes, (TILES_N, TILES_K, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11], AXES[12], AXES[13],
        )  # fmt: skip
    else:
        b_bits = tl.reshape(b_planes, (TILES_N, TILES_K, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_bits = tl.permute(
            b_bits, AXES[0], AXES[1], AXES[2], AXES[3], AXES[4], AXES[5], AXES[6],
            AXES[7], AXES[8], AXES[9], AXES[10], AXES[11], AXES[12],
        )  # fmt: skip
    b_weight = tl.reshape(b_bits, (SIDE_N, SIDE_K))
    if ASM:
        # No instruction: it hides the joins from the choice of the operand's layout, which would
        # take four neighbours in k for a lane where the fragments have two.
        b_weight = tl.inline_asm_elementwise(
            "", "=h,0", [b_weight], dtype=b_weight.dtype, is_pure=False, pack=1
        )
    return b_weight
