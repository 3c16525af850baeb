"""Loads and widens symbols of a trellis, whose values depend on the symbols of earlier outputs.

Rows g and g + 8 of 16 of a tile are a block's outputs 2g and 2g + 1: a lane of the tensor cores has
both, the fourth lane before it the two outputs before, and the last lanes come before the first. A
lane has four words of eight symbols in nibbles, in the order of codes of 4 bits, and stores

2 bits  two words, each the nibbles of two: the first's bits 0 and 1, the second's bits 2 and 3
3 bits  the first two words, then in a plane behind them the third; their top bits are the fourth's
4 bits  the words
5 bits  the words' low four bits; in a plane behind them a word of all fifth bits, the first word's
        in the lowest bits of its nibbles

`ASM` chooses between PTX and its twin in plain operations, which the interpreter runs.
"""

import triton
import triton.language as tl

from appliance.kernels.device.code_planes import join_eight
from appliance.kernels.weight_codes import ptx
from appliance.kernels.weight_codes.kernel import as_operand

BF16: tl.constexpr = tl.constexpr(ptx.TRELLIS_BF16)
FP16: tl.constexpr = tl.constexpr(ptx.TRELLIS_FP16)
CONSTRAINTS: tl.constexpr = tl.constexpr(ptx.TRELLIS_CONSTRAINTS)
TABLES: tl.constexpr = tl.constexpr(ptx.TRELLIS_TABLES)
LANES: tl.constexpr = tl.constexpr(128)  # of all warps that share a tile
LANES_OF_K: tl.constexpr = tl.constexpr(4)  # lanes that have the same rows


@triton.jit
def rows_of(o_n, TRELLIS: tl.constexpr):
    """Return the rows of a weight that a program's rows stand for; TRELLIS is 0 for other codes."""
    if TRELLIS == 0:
        return o_n
    return (o_n & ~15) | ((o_n & 7) << 1) | ((o_n >> 3) & 1)


@triton.jit
def load_words(p_tile, BACK: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Load words of each lane: (tiles in n, tiles in k, LANES, COUNT).

    Args:
        p_tile: (tiles in n, tiles in k) pointers to a tile's first word.
        BACK: of the outputs 2 * BACK before.
        FIRST: word of a tile where the plane begins.
        COUNT: words of a lane.
    """
    o_lane = (tl.arange(0, LANES) - LANES_OF_K * BACK) & (LANES - 1)
    o_word = FIRST + o_lane[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    return tl.load(p_tile[:, :, None, None] + o_word[None, None, :, :])


@triton.jit
def load_nibbles(p_tile, BACK: tl.constexpr, TRELLIS: tl.constexpr):
    """Return the symbols' low four bits, (tiles in n, tiles in k, LANES, 4)."""
    if TRELLIS >= 4:
        return load_words(p_tile, BACK, 0, 4)
    b_two = load_words(p_tile, BACK, 0, 2)
    SHAPE: tl.constexpr = [b_two.shape[0], b_two.shape[1], LANES, 4]
    if TRELLIS == 2:
        return tl.reshape(tl.join(b_two & 0x33333333, (b_two >> 2) & 0x33333333), SHAPE)
    b_first, b_second = tl.split(b_two)
    b_third = tl.reshape(load_words(p_tile, BACK, 2 * LANES, 1), b_first.shape)
    b_last = ((b_first >> 3) & 0x11111111) | ((b_second >> 2) & 0x22222222)
    b_last = b_last | ((b_third >> 1) & 0x44444444)
    b_even = tl.join(b_first & 0x77777777, b_third & 0x77777777)
    return tl.reshape(tl.join(b_even, tl.join(b_second & 0x77777777, b_last)), SHAPE)


@triton.jit
def load_fifth_bits(p_tile, BACK: tl.constexpr):
    """Return the symbols' fifth bits, each in the lowest bit of a nibble, as `load_nibbles`."""
    b_all = load_words(p_tile, BACK, 4 * LANES, 1)
    b_all = tl.broadcast_to(b_all, (b_all.shape[0], b_all.shape[1], LANES, 4))
    return (b_all >> tl.arange(0, 4)[None, None, None, :]) & 0x11111111


@triton.jit
def one_back(b_now, b_before):
    """Return the symbols one output back, from those of two outputs and of the two before."""
    return ((b_before >> 8) & 0x00FF00FF) | ((b_now & 0x00FF00FF) << 8)


@triton.jit
def entry(b_places, TRELLIS: tl.constexpr, TABLE: tl.constexpr, PLACE: tl.constexpr):
    """Look the nibbles of one of eight symbols up in a table."""
    b_place = (b_places >> (PLACE % 2 * 16 + PLACE // 2 * 4)) & 0xF
    OF_BITS: tl.constexpr = TABLES[TRELLIS - 2]
    b_lower = tl.where(b_place < 4, OF_BITS[4 * TABLE], OF_BITS[4 * TABLE + 1])
    b_upper = tl.where(b_place < 12, OF_BITS[4 * TABLE + 2], OF_BITS[4 * TABLE + 3])
    return (tl.where(b_place < 8, b_lower, b_upper) << (24 - 8 * (b_place & 3))) >> 24


@triton.jit
def value(b_0, b_1, b_2, b_3, TRELLIS: tl.constexpr, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Add entries for one of eight symbols, from the places in each table."""
    b_sum = entry(b_0, TRELLIS, 0, PLACE) + entry(b_1, TRELLIS, 1, PLACE)
    b_sum += entry(b_2, TRELLIS, 2, PLACE)
    if TRELLIS == 3:
        b_sum += entry(b_3, TRELLIS, 3, PLACE)
    return b_sum.to(tl.float32).to(DTYPE)


@triton.jit
def widen(b_0, b_1, b_2, b_3, TRELLIS: tl.constexpr, DTYPE: tl.constexpr):
    """Widen each word's eight symbols by plain operations, in three new axes of size 2.

    Args:
        b_0: symbols of two outputs; b_1, b_2 and b_3 as the operands of the PTX.
    """
    b_second, b_third, b_fourth = one_back(b_0, b_1), b_1, one_back(b_1, b_2)
    b_first = b_0
    if TRELLIS == 2:
        b_first = b_0 | (b_second << 2)
        b_third = b_first ^ (b_2 | (one_back(b_2, b_3) << 2))
        b_second = (b_second | (b_1 << 2)) ^ (b_1 | (b_fourth << 2))
    elif TRELLIS == 5:
        b_third = b_2 | (one_back(b_2, b_3) << 1) | ((b_1 & 0x33333333) << 2)
    a = value(b_first, b_second, b_third, b_fourth, TRELLIS, 0, DTYPE)
    b = value(b_first, b_second, b_third, b_fourth, TRELLIS, 1, DTYPE)
    c = value(b_first, b_second, b_third, b_fourth, TRELLIS, 2, DTYPE)
    d = value(b_first, b_second, b_third, b_fourth, TRELLIS, 3, DTYPE)
    e = value(b_first, b_second, b_third, b_fourth, TRELLIS, 4, DTYPE)
    f = value(b_first, b_second, b_third, b_fourth, TRELLIS, 5, DTYPE)
    g = value(b_first, b_second, b_third, b_fourth, TRELLIS, 6, DTYPE)
    h = value(b_first, b_second, b_third, b_fourth, TRELLIS, 7, DTYPE)
    return join_eight(a, b, c, d, e, f, g, h)


@triton.jit
def load_weights(
    p_tile,  # (tiles in n, tiles in k) pointers to a tile's first word
    AXES: tl.constexpr,  # of order.py
    SIDE_N: tl.constexpr,
    SIDE_K: tl.constexpr,
    TRELLIS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return weights (SIDE_N, SIDE_K) without their scales."""
    TILES_N: tl.constexpr = p_tile.shape[0]
    TILES_K: tl.constexpr = p_tile.shape[1]
    b_0, b_1 = load_nibbles(p_tile, 0, TRELLIS), load_nibbles(p_tile, 1, TRELLIS)
    b_2, b_3 = b_0, b_0
    if TRELLIS == 5:
        b_2, b_3 = load_fifth_bits(p_tile, 0), load_fifth_bits(p_tile, 1)
    elif TRELLIS < 4:
        b_2 = load_nibbles(p_tile, 2, TRELLIS)
        if TRELLIS == 2:
            b_3 = load_nibbles(p_tile, 3, TRELLIS)
    if not ASM:
        b_planes = widen(b_0, b_1, b_2, b_3, TRELLIS, DTYPE)
    else:
        if TRELLIS == 4:
            b_words = [b_0, b_1]
        elif TRELLIS == 3:
            b_words = [b_0, b_1, b_2]
        else:
            b_words = [b_0, b_1, b_2, b_3]
        if tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                BF16[TRELLIS - 2], CONSTRAINTS[TRELLIS - 2], b_words,
                dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                FP16[TRELLIS - 2], CONSTRAINTS[TRELLIS - 2], b_words,
                dtype=(tl.float16,) * 8, is_pure=True, pack=1,
            )  # fmt: skip
        b_planes = join_eight(a, b, c, d, e, f, g, h)
    return as_operand(b_planes, TILES_N, TILES_K, AXES, SIDE_N, SIDE_K, ASM)
