"""Reads the scales of GGML's types from records, words of several numbers for each output feature.

A record of a K type or of IQ1 to IQ4_XS is that of a block of 256 inputs: its integers of 4, 6 or 8
bits, and one or two halves that they are multiplied by, in as many bits as in a GGUF file. Programs
take half of it at a time. Its rows, of a word for each of a tile's 64 features unless stated:

    q2_k    d and dmin; 4 rows of bytes for 4 groups each, scale in the low bits, minimum above
    q3_k    2 rows of sixes, for half of the inputs each; a row of what is left of both halves; d
    q4_k    d and dmin, then as q3_k; a half's sixes are 4 scales, then 4 minima
    q6_k    4 rows of bytes for 4 groups each, plus 128; d
    iq4_xs  2 rows, for half of the inputs each: 4 integers of 6 bits, and a byte of d
    odd_32  a row of 4 bits for 8 groups, of which 2 n + 1 multiplies an eighth of d; d
    odd_16  2 rows, for half of the inputs each: the same for 8 groups; d
    q5_0    halves, two groups to a word; for as many inputs as a program takes
    q5_1    scale and minimum of a group, two halves; the same

A row of sixes has five numbers of 6 bits to a word, two in 16 bits of what is left, and the eighth
in the highest bits of both. A row of d alone takes half as many words: of features 0 to 31 in the
lower halves, of 32 to 63 in the upper ones.
"""

import triton
import triton.language as tl

SIDE: tl.constexpr = tl.constexpr(64)  # output features of a tile
# These bits are 2 ** 23 in float32; with those of a small integer beside them, so much more.
LARGE_BITS: tl.constexpr = tl.constexpr(0x4B000000)
LARGE: tl.constexpr = tl.constexpr(8388608.0)


@triton.jit
def load_record(
    params_ptr,
    b_feature,  # of the program
    i_tile,  # its first tile
    i_block,
    blocks_k,
    RECORD: tl.constexpr,  # words of a record
    PARAMS: tl.constexpr,
):
    """Load four words for each feature, of whose bits `record_scales` makes a block's scales."""
    b_tile, b_n = i_tile + b_feature // SIDE, b_feature % SIDE
    if PARAMS == "q5_0" or PARAMS == "q5_1":
        p_own = params_ptr + (b_tile * blocks_k + i_block) * RECORD + b_n
        b_0 = tl.load(p_own)
        b_1 = tl.load(p_own + SIDE) if RECORD > SIDE else b_0
        b_2 = tl.load(p_own + 2 * SIDE) if RECORD > 2 * SIDE else b_0
        b_3 = tl.load(p_own + 3 * SIDE) if RECORD > 2 * SIDE else b_0
    else:
        i_half = i_block % 2
        p_record = params_ptr + (b_tile * (blocks_k // 2) + i_block // 2) * RECORD
        p_own = p_record + b_n
        p_d = p_record + (RECORD - SIDE // 2) + b_n % 32
        if PARAMS == "q2_k":
            b_0 = tl.load(p_own)
            b_1 = tl.load(p_own + (1 + 2 * i_half) * SIDE)
            b_2 = tl.load(p_own + (2 + 2 * i_half) * SIDE)
        elif PARAMS == "q3_k":
            b_0 = tl.load(p_d) >> b_n // 32 * 16
            b_1 = tl.load(p_own + i_half * SIDE)
            b_2 = tl.load(p_own + 2 * SIDE) >> 16 * i_half
        elif PARAMS == "q4_k":
            b_0 = tl.load(p_own)
            b_1 = tl.load(p_own + (1 + i_half) * SIDE)
            b_2 = tl.load(p_own + 3 * SIDE) >> 16 * i_half
        elif PARAMS == "q6_k":
            b_0 = tl.load(p_d) >> b_n // 32 * 16
            b_1 = tl.load(p_own + 2 * i_half * SIDE)
            b_2 = tl.load(p_own + (2 * i_half + 1) * SIDE)
        elif PARAMS == "odd_32":
            b_0 = tl.load(p_d) >> b_n // 32 * 16
            b_1 = tl.load(p_own) >> 16 * i_half
            b_2 = b_1
        elif PARAMS == "odd_16":
            b_0 = tl.load(p_d) >> b_n // 32 * 16
            b_1 = tl.load(p_own + i_half * SIDE)
            b_2 = b_1
        else:
            b_first, b_second = tl.load(p_own), tl.load(p_own + SIDE)
            b_0 = (b_first >> 24 & 0xFF) | (b_second >> 16 & 0xFF00)
            b_1 = tl.where(i_half == 0, b_first, b_second)
            b_2 = b_1
        b_3 = b_0
    return b_0, b_1, b_2, b_3


@triton.jit
def record_scales(
    b_0,  # of `load_record`
    b_1,
    b_2,
    b_3,
    PLACE: tl.constexpr,  # of the group in the block
    MIDDLE: tl.constexpr,
    PARAMS: tl.constexpr,
):
    """Return scale and offset of a group, products in float32.

    With a minimum the offset is that of codes from which MIDDLE was subtracted.
    """
    if PARAMS == "q5_0":
        b_scale = float_of(b_0 if PLACE < 2 else b_1, PLACE % 2)
        b_offset = tl.zeros_like(b_scale)
    elif PARAMS == "q5_1":
        b_word = b_0 if PLACE == 0 else b_1 if PLACE == 1 else b_2 if PLACE == 2 else b_3
        b_scale = float_of(b_word, 0)
        b_offset = float_of(b_word, 1)
    elif PARAMS == "q2_k":
        b_byte = (b_1 if PLACE < 4 else b_2) >> (8 * (PLACE % 4))
        b_scale = float_of(b_0, 0) * less(b_byte & 15, 0.0)
        b_offset = -(float_of(b_0, 1) * less(b_byte >> 4 & 15, 0.0))
    elif PARAMS == "q4_k":
        b_scale = float_of(b_0, 0) * less(six_bits(b_1, b_2, PLACE), 0.0)
        b_offset = -(float_of(b_0, 1) * less(six_bits(b_1, b_2, 4 + PLACE), 0.0))
    elif PARAMS == "odd_32" or PARAMS == "odd_16":
        b_scale = float_of(b_0, 0) * 0.25 * less(b_1 >> (4 * PLACE) & 15, -0.5)
        b_offset = tl.zeros_like(b_scale)
    else:
        if PARAMS == "q3_k":
            b_integer = less(six_bits(b_1, b_2, PLACE), 32.0)
        elif PARAMS == "q6_k":
            b_byte = (b_1 if PLACE < 4 else b_2) >> (8 * (PLACE % 4))
            b_integer = less(b_byte & 0xFF, 128.0)
        else:
            b_integer = less(b_1 >> (6 * PLACE) & 63, 32.0)
        b_scale = float_of(b_0, 0) * b_integer
        b_offset = tl.zeros_like(b_scale)
    if MIDDLE:
        b_offset += MIDDLE * b_scale
    return b_scale, b_offset


@triton.jit
def float_of(b_word, HALF: tl.constexpr):
    """Return the float16 in one half of each word."""
    return (b_word >> (16 * HALF) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def less(b_integer, MIDDLE: tl.constexpr):
    """Return small integers, not negative, less a number, without a conversion's instruction."""
    return (b_integer | LARGE_BITS).to(tl.float32, bitcast=True) - (LARGE + MIDDLE)


@triton.jit
def six_bits(b_word, b_left, PLACE: tl.constexpr):
    """Return one of eight numbers of a row of sixes."""
    if PLACE < 5:
        return b_word >> (6 * PLACE) & 63
    elif PLACE < 7:
        return b_left >> (6 * (PLACE - 5)) & 63
    else:
        return (b_word >> 30 & 3) | (b_left >> 10 & 60)
