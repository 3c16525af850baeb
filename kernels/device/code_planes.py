"""Widens codes of 2, 3, 5 and 6 bits, whose bits lie in planes, and codes that name values."""

import triton
import triton.language as tl

from appliance.kernels.weight_codes import ptx

# Of int2, int3, int5, int6, iq4, iq3_s_4, iq3_xxs_4, iq2_3 and iq1_3; the tables of those from iq4.
PLANES_BF16: tl.constexpr = tl.constexpr(ptx.PLANES_BF16)
PLANES_FP16: tl.constexpr = tl.constexpr(ptx.PLANES_FP16)
NAMED_TABLES: tl.constexpr = tl.constexpr(ptx.NAMED_TABLES)
LANES: tl.constexpr = tl.constexpr(128)  # of all warps that share a tile


@triton.jit
def load_plane(p_tile, WORDS: tl.constexpr):
    """Load a plane of some tiles: each thread the words of a lane, as it has those of nibbles.

    Args:
        p_tile: (tiles in n, 1) pointers to the plane's first word.
        WORDS: of a plane, 128 to 512.
    """
    p_words = p_tile + tl.arange(0, WORDS)[None, :]
    return tl.load(tl.max_contiguous(p_words, [1, WORDS // LANES]))


@triton.jit
def words_of_group(b_words, TILES_N: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Return the words of some tiles' plane that hold one of 2 or 4 groups of inputs, moved to 0.

    A lane has four words of nibbles, two of pairs of bits or one of bits.
    """
    ROWS: tl.constexpr = TILES_N * LANES
    if b_words.numel == ROWS * 4:
        b_pairs = tl.reshape(b_words, (ROWS, 2, 2))
        b_first, b_second = tl.split(tl.permute(b_pairs, (0, 2, 1)))
        b_some = b_first if 2 * GROUP < GROUPS else b_second
        if GROUPS == 4:
            b_first, b_second = tl.split(b_some)
            b_some = b_first if GROUP % 2 == 0 else b_second
        return b_some
    elif b_words.numel == ROWS * 2:
        b_first, b_second = tl.split(tl.reshape(b_words, (ROWS, 2)))
        b_some = b_first if 2 * GROUP < GROUPS else b_second
        return b_some >> (8 * (GROUP % 2)) if GROUPS == 4 else tl.join(b_some, b_some >> 8)
    else:
        b_lane = tl.reshape(b_words, (ROWS,)) >> (16 // GROUPS * GROUP)
        if GROUPS == 4:
            return b_lane
        else:
            return tl.join(b_lane, b_lane >> 4)


@triton.jit
def named_value(b_code, CODES: tl.constexpr):
    """Return the values that codes of 3 or 4 bits name, int32."""
    OF_4: tl.constexpr = 1 if CODES == "iq3_s_4" else 2 if CODES == "iq3_xxs_4" else 0
    OF_3: tl.constexpr = 3 if CODES == "iq2_3" else 4
    TABLE: tl.constexpr = NAMED_TABLES[OF_4 if CODES[-1] == "4" else OF_3]
    b_table = tl.where(b_code < 4, TABLE[0], TABLE[1])
    if CODES[-1] == "4":
        b_upper = tl.where(b_code < 12, TABLE[2], TABLE[3])
        b_table = tl.where(b_code < 8, b_table, b_upper)
    return (b_table << (24 - 8 * (b_code & 3))) >> 24


@triton.jit
def plane(b_words, b_upper, CODES: tl.constexpr, PLACE: tl.constexpr, DTYPE: tl.constexpr):
    """Widen one of a word's eight codes: pair PLACE / 2, half PLACE % 2."""
    HALF: tl.constexpr = PLACE % 2 * 16
    LOW: tl.constexpr = 2 if CODES[-1] == "2" or CODES[-1] == "3" else 4
    b_code = (b_words >> (HALF + PLACE // 2 * LOW)) & ((1 << LOW) - 1)
    if CODES[-1] == "3" or CODES == "int5":
        b_code |= ((b_upper >> (HALF + PLACE // 2)) & 1) << LOW
    if CODES == "int6":
        b_code |= ((b_upper >> (HALF + PLACE // 2 * 2)) & 3) << LOW
    if CODES[1] == "q":
        return named_value(b_code, CODES).to(tl.float32).to(DTYPE)
    MIDDLE_OF_HIGH: tl.constexpr = 16 if CODES == "int5" else 32
    MIDDLE: tl.constexpr = 2 if CODES == "int2" else 4 if CODES == "int3" else MIDDLE_OF_HIGH
    return (b_code - MIDDLE).to(tl.float32).to(DTYPE)


@triton.jit
def widen_planes(b_words, b_upper, CODES: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Widen the eight codes of each word, in three new axes j0, j1, j2 of size 2.

    `b_upper` has the bits above those of `b_words`, in words of the same shape, or is None.
    """
    INT: tl.constexpr = 1 if CODES == "int3" else 2 if CODES == "int5" else 3
    OF_4: tl.constexpr = 5 if CODES == "iq3_s_4" else 6 if CODES == "iq3_xxs_4" else 4
    OF_3: tl.constexpr = 7 if CODES == "iq2_3" else 8
    IQ: tl.constexpr = OF_4 if CODES[-1] == "4" else OF_3
    KIND: tl.constexpr = IQ if CODES[1] == "q" else 0 if CODES == "int2" else INT
    if not ASM:
        a = plane(b_words, b_upper, CODES, 0, DTYPE)
        b = plane(b_words, b_upper, CODES, 1, DTYPE)
        c = plane(b_words, b_upper, CODES, 2, DTYPE)
        d = plane(b_words, b_upper, CODES, 3, DTYPE)
        e = plane(b_words, b_upper, CODES, 4, DTYPE)
        f = plane(b_words, b_upper, CODES, 5, DTYPE)
        g = plane(b_words, b_upper, CODES, 6, DTYPE)
        h = plane(b_words, b_upper, CODES, 7, DTYPE)
    elif tl.bfloat16 == DTYPE:
        if b_upper is None:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                PLANES_BF16[KIND],
                "=h,=h,=h,=h,=h,=h,=h,=h,r",
                [b_words],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
        else:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                PLANES_BF16[KIND],
                "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
                [b_words, b_upper],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=1,
            )
    elif b_upper is None:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            PLANES_FP16[KIND],
            "=h,=h,=h,=h,=h,=h,=h,=h,r",
            [b_words],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            PLANES_FP16[KIND],
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [b_words, b_upper],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=1,
        )
    return join_eight(a, b, c, d, e, f, g, h)


@triton.jit
def join_eight(a, b, c, d, e, f, g, h):
    """Join planes 0..7 in three new axes j0, j1, j2 of size 2."""
    b_low = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.join(b_low, tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def code_of(p_tile, b_n, b_k, BITS: tl.constexpr):
    """Load codes of a stored tile one by one.

    Args:
        p_tile: pointer to the tile's first word, of the shape of the result or broadcast to it.
        b_n: feature of the tile.
        b_k: input of the tile.
        BITS: of a code, 2 to 6.
    """
    b_lane = b_n // 16 * 32 + b_n % 8 * 4 + b_k // 2 % 4
    b_pair, b_half = b_n // 8 % 2 * 2 + b_k // 8 % 2, b_k % 2
    b_place = b_k // 16  # of the lane's four words of nibbles
    LOW: tl.constexpr = 4 if BITS > 3 else 2
    HIGH: tl.constexpr = BITS - LOW
    b_word = tl.load(p_tile + b_lane * LOW + b_place * LOW // 4)
    b_code = b_word >> (b_place * LOW * 4 % 16 + b_pair * LOW + b_half * 16) & ((1 << LOW) - 1)
    if HIGH:
        b_word = tl.load(p_tile + LOW * LANES + b_lane * HIGH + b_place * HIGH // 4)
        b_upper = b_word >> (b_place * HIGH * 4 % 16 + b_pair * HIGH + b_half * 16)
        b_code = b_code | (b_upper & ((1 << HIGH) - 1)) << LOW
    return b_code
