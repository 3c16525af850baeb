"""Pages on the GPU: widens words of codes to a tile of halves in registers.

`ASM` chooses between PTX and a twin in plain operations with the same results, which Triton's
interpreter runs.
"""

import triton
import triton.language as tl

from appliance.kernels.kv_page import layout, ptx

_INT8: tl.constexpr = tl.constexpr(ptx.INT8)
_INT8_ROWS: tl.constexpr = tl.constexpr(ptx.INT8_ROWS)
_INT4: tl.constexpr = tl.constexpr(ptx.INT4)
_FP8: tl.constexpr = tl.constexpr(ptx.FP8)
_FP8_BITS: tl.constexpr = tl.constexpr(ptx.FP8_BITS)

_KEY_AXES_8: tl.constexpr = tl.constexpr(layout.KEYS[8].axes)
_KEY_AXES_4: tl.constexpr = tl.constexpr(layout.KEYS[4].axes)
_VALUE_AXES_8: tl.constexpr = tl.constexpr(layout.VALUES[8].axes)
_VALUE_AXES_4: tl.constexpr = tl.constexpr(layout.VALUES[4].axes)
_ROW_AXES: tl.constexpr = tl.constexpr(layout.PROBABILITY_AXES)


@triton.jit
def int8_halves(b_word, ASM: tl.constexpr):
    """Return the four biased bytes of a word as float16."""
    if ASM == "none":
        return (
            ((b_word & 0xFF) - 128).to(tl.float16),
            (((b_word >> 8) & 0xFF) - 128).to(tl.float16),
            (((b_word >> 16) & 0xFF) - 128).to(tl.float16),
            (((b_word >> 24) & 0xFF) - 128).to(tl.float16),
        )
    else:
        return tl.inline_asm_elementwise(
            _INT8, "=h,=h,=h,=h,r", [b_word], (tl.float16,) * 4, is_pure=True, pack=1
        )


@triton.jit
def row_halves(b_code, ASM: tl.constexpr):
    """Return biased bytes, uint8 with at least four neighbours in a thread, as float16.

    It is not called pure: else Triton lays out a product's operand by the width of the bytes, for
    which shared memory has no loads of matrices.
    """
    if ASM == "none":
        return (b_code.to(tl.int32) - 128).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            _INT8_ROWS, "=r,=r,r", [b_code], tl.float16, is_pure=False, pack=4
        )


@triton.jit
def e4m3_half(b_byte):
    """Return one E4M3 code as float16, times 2^-8."""
    b_bits = ((b_byte & 0x80) << 8) | ((b_byte & 0x7F) << 7)
    return b_bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def fp8_halves(b_word, ASM: tl.constexpr):
    """Return the four E4M3 codes of a word as float16; times 2^-8 unless ASM is "fp8"."""
    if ASM == "none":
        return (
            e4m3_half(b_word & 0xFF),
            e4m3_half((b_word >> 8) & 0xFF),
            e4m3_half((b_word >> 16) & 0xFF),
            e4m3_half((b_word >> 24) & 0xFF),
        )
    else:
        return tl.inline_asm_elementwise(
            _FP8 if ASM == "fp8" else _FP8_BITS,
            "=h,=h,=h,=h,r",
            [b_word],
            (tl.float16,) * 4,
            is_pure=True,
            pack=1,
        )


@triton.jit
def int4_halves(b_word, ASM: tl.constexpr):
    """Return the eight nibbles of a word less 8 as float16, in the order of `CodeOrder.part`."""
    if ASM == "none":
        return (
            ((b_word & 0xF) - 8).to(tl.float16),
            (((b_word >> 16) & 0xF) - 8).to(tl.float16),
            (((b_word >> 4) & 0xF) - 8).to(tl.float16),
            (((b_word >> 20) & 0xF) - 8).to(tl.float16),
            (((b_word >> 8) & 0xF) - 8).to(tl.float16),
            (((b_word >> 24) & 0xF) - 8).to(tl.float16),
            (((b_word >> 12) & 0xF) - 8).to(tl.float16),
            (((b_word >> 28) & 0xF) - 8).to(tl.float16),
        )
    else:
        return tl.inline_asm_elementwise(
            _INT4, "=h,=h,=h,=h,=h,=h,=h,=h,r", [b_word], (tl.float16,) * 8, is_pure=True, pack=1
        )


@triton.jit
def permute(x, AXES: tl.constexpr):
    return tl.permute(
        x,
        AXES[0],
        AXES[1],
        AXES[2],
        AXES[3],
        AXES[4],
        AXES[5],
        AXES[6],
        AXES[7],
        AXES[8],
        AXES[9],
        AXES[10],
    )


@triton.jit
def codes_tile(
    b_word,  # (words,) int32, a page's codes of keys or of values
    CODES: tl.constexpr,  # "int8", "fp8" or "int4"
    ASM: tl.constexpr,  # "none", "ptx" or, with the instructions for E4M3, "fp8"
    KEYS: tl.constexpr,  # else values
    HEAD_DIM_PADDED: tl.constexpr,
):
    """Return the codes as float16, with no move between lanes.

    Keys are (HEAD_DIM_PADDED, 32) with rows in the order of `key_dims`; values (32,
    HEAD_DIM_PADDED) with rows in the order of `as_value_rows`.
    """
    if CODES == "int4" or CODES == "sealed":
        a, b, c, d, e, f, g, h = int4_halves(b_word, ASM)
        low = tl.join(tl.join(a, b), tl.join(c, d))
        high = tl.join(tl.join(e, f), tl.join(g, h))
        b_codes = tl.join(low, high)
        b_codes = tl.reshape(b_codes, (HEAD_DIM_PADDED // 32, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_codes = permute(b_codes, _KEY_AXES_4 if KEYS else _VALUE_AXES_4)
    else:
        if CODES == "int8":
            a, b, c, d = int8_halves(b_word, ASM)
        else:
            a, b, c, d = fp8_halves(b_word, ASM)
        b_codes = tl.join(tl.join(a, b), tl.join(c, d))
        b_codes = tl.reshape(b_codes, (HEAD_DIM_PADDED // 32, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
        b_codes = permute(b_codes, _KEY_AXES_8 if KEYS else _VALUE_AXES_8)
    if KEYS:
        return tl.reshape(b_codes, (HEAD_DIM_PADDED, 32))
    else:
        return tl.reshape(b_codes, (32, HEAD_DIM_PADDED))


@triton.jit
def as_value_rows(b_weight):
    """Reorder columns of probabilities (rows, 32) as the rows of the values' tile."""
    ROWS: tl.constexpr = b_weight.shape[0]
    b_weight = tl.reshape(b_weight, (ROWS, 2, 2, 2, 2, 2))
    b_weight = tl.permute(
        b_weight,
        _ROW_AXES[0],
        _ROW_AXES[1],
        _ROW_AXES[2],
        _ROW_AXES[3],
        _ROW_AXES[4],
        _ROW_AXES[5],
    )
    return tl.reshape(b_weight, (ROWS, 32))


@triton.jit
def key_dims(o_row):
    """Return the dimension in a row of the keys' tile: `layout.ROW_DIMS`."""
    return (o_row & ~28) | ((o_row & 16) >> 2) | ((o_row & 12) << 1)


@triton.jit
def scale_of(b_word):
    """Return the lower half of a record's word, a float16."""
    return (b_word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
