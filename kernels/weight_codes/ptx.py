"""Widens packed codes exactly to bfloat16 or float16 in registers, as PTX.

A 32-bit word holds 8 codes of 4 bits or 4 of 8 bits; results $0, $1, ... are its planes, in the
order of `order.py`, and the last operand is the word. Codes of other sizes have the lowest bits of
each half of one or two words. One logical instruction puts two integer codes into the mantissas of
a power of two; subtracting that power and the code that stands for 0 leaves small exact integers. A
test executes these texts over all codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.weights.ggml_types import (
    IQ1_VALUES,
    IQ2_VALUES,
    IQ3_S_VALUES,
    IQ3_XXS_VALUES,
    IQ4_VALUES,
)
from appliance.kernels.weights.trellis import BITS, TABLES

if TYPE_CHECKING:
    from collections.abc import Sequence


def _block(*lines: str) -> str:
    return "{\n" + "\n".join(lines) + "\n}"


# The word of two numbers 128 or 1024, whose mantissas take codes, and two ones.
_BASES = {"bf16": 0x43004300, "f16": 0x64006400}
_ONES = {"bf16": 0x3F803F80, "f16": 0x3C003C00}
_NEGATIVE = 0x80008000


def _integers(dtype: str, low: int, high: int = 0, *, center: int | None) -> str:
    """Return the PTX for integer codes.

    Args:
        dtype: of the results.
        low: bits of a code in operand 8.
        high: bits above them in operand 9; 0 if there are none.
        center: subtracted; None for operands 9 and 10, one for each of a word's two rows.
    """
    base = _BASES[dtype]
    lines = [".reg .b32 t, a, b, c, d, one, minus;", f"mov.b32 one, 0x{_ONES[dtype]:08x};"]
    if center is not None:
        lines.append(f"mov.b32 minus, 0x{base | _NEGATIVE | center * 0x10001:08x};")
    for i, pair in enumerate("abcd"):
        source = _moved(lines, "$8", low * i)
        # a & b | c
        lines.append(f"lop3.b32 {pair}, {source}, 0x{_both((1 << low) - 1)}, 0x{base:08x}, 0xea;")
    for i, pair in enumerate("abcd" if high else ""):
        source = _moved(lines, "$9", high * i - low)
        mask = _both(((1 << high) - 1) << low)
        lines.append(f"lop3.b32 {pair}, {source}, 0x{mask}, {pair}, 0xea;")
    for i, pair in enumerate("abcd"):
        minus = "minus" if center is not None else f"${9 + i // 2}"
        lines.append(f"fma.rn.{dtype}x2 {pair}, {pair}, one, {minus};")
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate("abcd")]
    return _block(*lines)


def _moved(lines: list[str], operand: str, right: int) -> str:
    """Add a shift of an operand to the right, or to the left; return the register."""
    if right:
        lines.append(
            f"shr.u32 t, {operand}, {right};" if right > 0 else f"shl.b32 t, {operand}, {-right};"
        )
    return "t" if right else operand


def _both(half: int) -> str:
    return f"{half:04x}" * 2


# 128 + q less 136, and 1024 + q less 1032.
INT4_BF16 = _integers("bf16", 4, center=8)
INT4_FP16 = _integers("f16", 4, center=8)
# 128 + q less 128 + zero point, and 1024 + q less 1024 + zero point.
INT4_ZERO_BF16 = _integers("bf16", 4, center=None)
INT4_ZERO_FP16 = _integers("f16", 4, center=None)


def _scaled_int4(dtype: str) -> str:
    """Return the PTX for codes with scale and offset, rounded once.

    Operand 8 is the word, 9 and 10 are scale and offset of its first row, 11 and 12 of the second,
    float32. Moved to bit 12 or 16, a code is in the mantissa of 2048 or 128, and what is too much
    goes with the offset: float32 loses less than 2^-12 of a scale.
    """
    lines = [".reg .b32 t, u, a, b, c, d;", ".reg .b32 first12, first16, second12, second16;"]
    for row, (scale, offset) in {"first": ("$9", "$10"), "second": ("$11", "$12")}.items():
        for at, too_much in _TOO_MUCH.items():
            lines.append(f"fma.rn.f32 {row}{at}, {scale}, 0f{too_much:08x}, {offset};")
    for i, pair in enumerate("abcd"):
        row, scale = ("first", "$9") if i < 2 else ("second", "$11")
        for name, bit in (("t", 4 * i), ("u", 4 * i + 16)):
            at = 12 if (bit - 12) % 8 == 0 else 16
            if bit == 8:  # shares its shift with no other
                at = 16
            mantissa, base = (0xF000, 0x45000000) if at == 12 else (0xF0000, 0x43000000)
            source = "$8" if bit == at else name
            if bit < at:
                lines.append(f"shl.b32 {name}, $8, {at - bit};")
            elif bit > at:
                lines.append(f"shr.u32 {name}, $8, {bit - at};")
            lines.append(f"lop3.b32 {name}, {source}, 0x{mantissa:08x}, 0x{base:08x}, 0xea;")
            lines.append(f"fma.rn.f32 {name}, {name}, {scale}, {row}{at};")
        lines.append(f"cvt.rn.{dtype}x2.f32 {pair}, u, t;")
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate("abcd")]
    return _block(*lines)


_TOO_MUCH = {12: 0xC5008000, 16: 0xC3080000}  # -2056 and -136, with the middle code
INT4_SCALED_BF16 = _scaled_int4("bf16")
INT4_SCALED_FP16 = _scaled_int4("f16")


def scaled_pairs(dtype: str, low: int, high: int = 0) -> str:
    """Return the PTX for codes with scale and offset, rounded once.

    The operands after the codes are scale and offset of the first row, then of the second, in
    float32. As bfloat16 a pair of codes is 128 + q twice. The register, and with its halves
    exchanged, is one of them in float32 and a little more, which depends on the other: 2^-11 of a
    scale at most, once its middle is part of the offset.
    """
    scale = 10 if high else 9
    lines = [".reg .b32 t, u, a, b, c, d;"]
    for i, pair in enumerate("abcd"):
        source = _moved(lines, "$8", low * i)
        lines.append(f"lop3.b32 {pair}, {source}, 0x{_both((1 << low) - 1)}, 0x43004300, 0xea;")
        if high:
            source = _moved(lines, "$9", high * i - low)
            mask = _both(((1 << high) - 1) << low)
            lines.append(f"lop3.b32 {pair}, {source}, 0x{mask}, {pair}, 0xea;")
        row = scale + 2 * (i // 2)
        lines += [
            f"prmt.b32 t, {pair}, 0, 0x1032;",
            f"fma.rn.f32 t, t, ${row}, ${row + 1};",
            f"fma.rn.f32 u, {pair}, ${row}, ${row + 1};",
            f"cvt.rn.{dtype}x2.f32 {pair}, u, t;",
        ]
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate("abcd")]
    return _block(*lines)


def _in_words(values: Sequence[int]) -> tuple[int, ...]:
    """Return values, a byte each, in words of int32, four in each."""
    parts = (values[i : i + 4] for i in range(0, len(values), 4))
    return tuple(
        int.from_bytes(bytes(value & 0xFF for value in part), "little", signed=True)
        for part in parts
    )


# The values that codes name: of iq4, iq3_s_4, iq3_xxs_4, iq2_3 and iq1_3.
NAMED_TABLES = tuple(
    _in_words(values)
    for values in (IQ4_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES, IQ2_VALUES, IQ1_VALUES)
)


def _named(dtype: str, table: Sequence[int]) -> str:
    """Return the PTX for codes that name values of -128 to 127, each a byte of some registers.

    Of 4 bits, `prmt` chooses one of the lower and one of the upper eight, and the fourth bit of the
    code chooses of those two. Operand 8 is the word. Of 3 bits, operand 9 has their third ones, and
    the bits of both are moved to nibbles first.
    """
    lines = [
        ".reg .b32 t, u, v, w, x, y, a, b, c, d, one, minus;",
        f"mov.b32 one, {'0xbf80bf80' if dtype == 'bf16' else '0x3c003c00'};",
        "mov.b32 minus, 0xe480e480;",
    ]
    if len(table) == 4:
        lines += [
            *_selectors("$8", "t", "u"),
            *_looked_up("t", "u", table, "x"),
            "shr.u32 t, t, 16;",
            "shr.u32 u, u, 16;",
            *_looked_up("t", "u", table, "y"),
        ]
    else:
        lines += [
            *_apart("$8", "t", 0x00FF00FF, (4, 0x0F0F0F0F), (2, 0x33333333)),
            *_apart("$9", "u", 0x000F000F, (6, 0x03030303), (3, 0x11111111)),
            "shl.b32 u, u, 2;",
            "or.b32 t, t, u;",
            _of_eight("t", table, "x"),
            "shr.u32 t, t, 16;",
            _of_eight("t", table, "y"),
        ]
    for i, pair in enumerate("abcd"):
        lines.append(f"prmt.b32 t, x, y, 0x{i + 4}{i + 4}{i}{i};")
        if dtype == "bf16":  # as INT8_BF16
            lines += [
                f"lop3.b32 {pair}, t, 0x007f007f, 0x43004300, 0xea;",
                "lop3.b32 t, t, 0x00800080, 0x43004300, 0xea;",
                f"fma.rn.bf16x2 {pair}, t, one, {pair};",
            ]
        else:  # as INT8_FP16
            lines += [
                f"lop3.b32 {pair}, t, 0x00ff00ff, 0x64806480, 0x6a;",
                f"fma.rn.f16x2 {pair}, {pair}, one, minus;",
            ]
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate("abcd")]
    return _block(*lines)


def _apart(operand: str, found: str, mask: int, *moves: tuple[int, int]) -> list[str]:
    """Return PTX that keeps the bits of a mask, then by each move shifts half of them apart."""
    lines = [f"and.b32 {found}, {operand}, 0x{mask:08x};"]
    for left, kept in moves:
        lines.append(f"shl.b32 v, {found}, {left};")
        lines.append(f"lop3.b32 {found}, {found}, v, 0x{kept:08x}, 0xa8;")  # a | b, & c
    return lines


def _selectors(codes: str, of_eight: str, of_two: str) -> list[str]:
    """Return PTX for the registers by which `prmt` chooses of eight entries, then of two."""
    return [
        f"and.b32 {of_eight}, {codes}, 0x77777777;",
        f"shr.u32 {of_two}, {codes}, 1;",
        f"lop3.b32 {of_two}, {of_two}, 0x44444444, 0x32103210, 0xea;",
    ]


def _looked_up(of_eight: str, of_two: str, table: Sequence[int], found: str) -> list[str]:
    """Return PTX that looks four codes up in a table of 16 bytes."""
    return [
        _of_eight(of_eight, table[:2], "v"),
        _of_eight(of_eight, table[2:], "w"),
        f"prmt.b32 {found}, v, w, {of_two};",
    ]


def _of_eight(codes: str, table: Sequence[int], found: str) -> str:
    first, second = (f"0x{word & 0xFFFFFFFF:08x}" for word in table)
    return f"prmt.b32 {found}, {first}, {second}, {codes};"


def _planes(dtype: str) -> tuple[str, ...]:
    """Return the PTX of `widen_planes` for int2, int3, int5 and int6, then those of the tables."""
    return (
        _integers(dtype, 2, center=2),
        _integers(dtype, 2, 1, center=4),
        _integers(dtype, 4, 1, center=16),
        _integers(dtype, 4, 2, center=32),
        *(_named(dtype, table) for table in NAMED_TABLES),
    )


PLANES_BF16 = _planes("bf16")
PLANES_FP16 = _planes("f16")


def _one_back(found: str, codes: str, before: str) -> str:
    """Return PTX for the symbols one output back: a byte of those before, then one of these."""
    return f"prmt.b32 {found}, {codes}, {before}, 0x2705;"


# By bits: operands of `_trellis`, and PTX that makes of them the places in each table, i0 to i3.
_TRELLIS_OPERANDS = {2: 4, 3: 3, 4: 2, 5: 4}
_PLACES = {
    2: [
        *(_one_back(f"i{i}", f"${8 + i}", f"${9 + i}") for i in range(3)),
        *(f"shl.b32 {name}, {name}, 2;" for name in ("i0", "i1", "i2")),
        "or.b32 t, $8, i0;",  # the last symbol and the one before it
        "shr.u32 i0, i0, 2;",
        "shl.b32 u, $9, 2;",
        "or.b32 i0, i0, u;",
        "or.b32 i1, i1, $9;",
        "xor.b32 i1, i1, i0;",
        "or.b32 i2, i2, $10;",
        "xor.b32 i2, i2, t;",
        "mov.b32 i0, t;",
    ],
    3: ["mov.b32 i0, $8;", _one_back("i1", "$8", "$9"), "mov.b32 i2, $9;",
        _one_back("i3", "$9", "$10")],
    4: ["mov.b32 i0, $8;", _one_back("i1", "$8", "$9"), "mov.b32 i2, $9;"],
    5: [
        "mov.b32 i0, $8;",
        _one_back("i1", "$8", "$9"),
        _one_back("i2", "$10", "$11"),
        "shl.b32 i2, i2, 1;",
        "or.b32 i2, i2, $10;",
        "shl.b32 t, $9, 2;",
        "lop3.b32 i2, t, 0xcccccccc, i2, 0xea;",
    ],
}  # fmt: skip


def _trellis(bits: int, dtype: str) -> str:
    """Return the PTX for symbols of a trellis whose value is the sum of tables' entries.

    Operand 8 has the symbols of two outputs, of each of four inputs, in nibbles: in each half, a
    byte of the first output's and one of the second's. The operands after it have those of the two
    outputs before, and so on; of 5 bits, operands 10 and 11 have the fifth bits of those of
    operands 8 and 9. Entries are raised so that no sum of bytes is below 0, and 128 stands for 0.
    """
    tables = TABLES[bits]
    raised = [-min(table) for table in tables]
    raised[0] += 128 - sum(raised)
    assert raised[0] + min(tables[0]) >= 0, "sums are below -128"
    lines = [
        ".reg .b32 i0, i1, i2, i3, t, u, v, w, x, y, z, a, b, c, d, one, minus;",
        f"mov.b32 one, {'0xbf80bf80' if dtype == 'bf16' else '0x3c003c00'};",
        "mov.b32 minus, 0xe480e480;",
        *_PLACES[bits],
    ]
    for i, (table, more) in enumerate(zip(tables, raised, strict=True)):
        words = _in_words([entry + more for entry in table])
        finds = "zz" if i else "xy"
        if len(table) == 16:
            lines += _selectors(f"i{i}", "t", "u")
        for half, (found, total) in enumerate(zip(finds, "xy", strict=True)):
            if len(table) == 8:
                of_eight = f"i{i}"
                lines += [f"shr.u32 {of_eight}, {of_eight}, 16;"] * half
                lines.append(_of_eight(of_eight, words, found))
            else:
                lines += ["shr.u32 t, t, 16;", "shr.u32 u, u, 16;"] * half
                lines += _looked_up("t", "u", words, found)
            if i:
                lines.append(f"add.u32 {total}, {total}, z;")
    for i, pair in enumerate("abcd"):
        lines.append(f"prmt.b32 t, x, y, 0x{i + 4}{i + 4}{i}{i};")
        if dtype == "bf16":  # as INT8_BF16, but the top bit is not flipped
            lines += [
                f"lop3.b32 {pair}, t, 0x007f007f, 0x43004300, 0xea;",
                "lop3.b32 t, t, 0x00800080, 0x43804380, 0x6a;",
                f"fma.rn.bf16x2 {pair}, t, one, {pair};",
            ]
        else:
            lines += [
                f"lop3.b32 {pair}, t, 0x00ff00ff, 0x64006400, 0xea;",
                f"fma.rn.f16x2 {pair}, {pair}, one, minus;",
            ]
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate("abcd")]
    return _block(*lines)


# By bits, 2 to 5. A table is four words; of 3 bits, two and nothing.
TRELLIS_BF16 = tuple(_trellis(bits, "bf16") for bits in BITS)
TRELLIS_FP16 = tuple(_trellis(bits, "f16") for bits in BITS)
TRELLIS_CONSTRAINTS = tuple("=h," * 8 + ",".join("r" * _TRELLIS_OPERANDS[bits]) for bits in BITS)
TRELLIS_TABLES = tuple(
    tuple(word for table in TABLES[bits] for word in (*_in_words(table), 0, 0)[:4]) for bits in BITS
)
# Puts the upper half of a word of scale and zero point into both halves, negated.
ZERO_BF16 = "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x3232; or.b32 $0, t, 0xc300c300; }"
ZERO_FP16 = "{ .reg .b32 t; prmt.b32 t, $1, 0, 0x3232; or.b32 $0, t, 0xe400e400; }"


def _fp4(dtype: str, mantissa: int) -> str:
    """Return the PTX; operand 8 is the word, 9 and 10 the scales of its two rows, in both halves.

    Exponent and mantissa of e2m1 go to the lowest places of those of the result, which makes a
    number too small by a power of two that the scales make up for; the product is exact.

    Args:
        dtype: of the results.
        mantissa: bits of its mantissa.
    """
    mask = 7 << (mantissa - 1)
    lines = [".reg .b32 m, s, a, b, c, d, zero;", "mov.b32 zero, 0x80008000;"]  # -0.0
    for i, pair in enumerate("abcd"):
        for name, up in (("m", mantissa - 1 - 4 * i), ("s", 12 - 4 * i)):
            move = f"shl.b32 {name}, $8, {up};" if up >= 0 else f"shr.u32 {name}, $8, {-up};"
            lines.append(move)
        lines.append("and.b32 s, s, 0x80008000;")
        lines.append(f"lop3.b32 {pair}, m, 0x{mask:04x}{mask:04x}, s, 0xea;")
    for i, pair in enumerate("abcd"):
        lines.append(f"fma.rn.{dtype}x2 {pair}, {pair}, ${9 + i // 2}, zero;")
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate("abcd")]
    return _block(*lines)


FP4_BF16 = _fp4("bf16", 7)
FP4_FP16 = _fp4("f16", 10)
# Puts one half of a word into both halves of another.
LOW_TWICE = "prmt.b32 $0, $1, 0, 0x1010;"
HIGH_TWICE = "prmt.b32 $0, $1, 0, 0x3232;"

# Stored with the top bit flipped, q - 128 = (128 + low seven bits) - (256 if flipped else 128).
INT8_BF16 = _block(
    ".reg .b32 t, a, b, c, d, minus_one;",
    "mov.b32 minus_one, 0xbf80bf80;",
    "shr.u32 t, $4, 8;",
    "lop3.b32 a, $4, 0x007f007f, 0x43004300, 0xea;",
    "lop3.b32 c, $4, 0x00800080, 0x43004300, 0xea;",
    "lop3.b32 b, t, 0x007f007f, 0x43004300, 0xea;",
    "lop3.b32 d, t, 0x00800080, 0x43004300, 0xea;",
    "fma.rn.bf16x2 a, c, minus_one, a;",
    "fma.rn.bf16x2 b, d, minus_one, b;",
    "mov.b32 {$0, $1}, a;",
    "mov.b32 {$2, $3}, b;",
)
# 1024 + q, from the flipped byte by a & b ^ c, minus 1152.
INT8_FP16 = _block(
    ".reg .b32 t, a, b, one, minus;",
    "mov.b32 one, 0x3c003c00;",
    "mov.b32 minus, 0xe480e480;",
    "shr.u32 t, $4, 8;",
    "lop3.b32 a, $4, 0x00ff00ff, 0x64806480, 0x6a;",
    "lop3.b32 b, t, 0x00ff00ff, 0x64806480, 0x6a;",
    "fma.rn.f16x2 a, a, one, minus;",
    "fma.rn.f16x2 b, b, one, minus;",
    "mov.b32 {$0, $1}, a;",
    "mov.b32 {$2, $3}, b;",
)


def _fp8(dtype: str, shift: int, mask: str, power: str) -> str:
    """Return the PTX: sign, exponent and mantissa of e4m3 in place, times a power of two.

    Exact, subnormals and both zeros included. The two codes of NaN become +-480: they are refused
    when a weight is prepared.
    """
    return _block(
        ".reg .b32 t, s, a, b, power, zero;",
        f"mov.b32 power, {power};",
        "mov.b32 zero, 0x80008000;",  # -0.0, which keeps the sign of zeros
        "shl.b32 t, $4, 8;",
        "and.b32 s, t, 0x80008000;",
        f"shr.u32 t, t, {shift};",
        f"lop3.b32 a, t, {mask}, s, 0xea;",
        "and.b32 s, $4, 0x80008000;",
        f"shr.u32 t, $4, {shift};",
        f"lop3.b32 b, t, {mask}, s, 0xea;",
        f"fma.rn.{dtype}x2 a, a, power, zero;",
        f"fma.rn.{dtype}x2 b, b, power, zero;",
        "mov.b32 {$0, $1}, a;",
        "mov.b32 {$2, $3}, b;",
    )


FP8_BF16 = _fp8("bf16", 4, "0x07f007f0", "0x7b807b80")
FP8_FP16 = _fp8("f16", 1, "0x3f803f80", "0x5c005c00")
