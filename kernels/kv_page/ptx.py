"""Widens a word of codes to halves, as PTX; each text has a twin in `kernel.py`.

A test executes these texts over all codes. $0, $1, ... are the results, two to a register; the last
operand is the word.
"""

from __future__ import annotations

# Biased bytes (code + 128) to float16: 0x64 above a byte u is 1024 + u.
INT8 = """
{
.reg .b32 lo, hi, magic, bias;
mov.b32 magic, 0x64646464;
mov.b32 bias, 0x64806480;
prmt.b32 lo, $4, magic, 0x4140;
prmt.b32 hi, $4, magic, 0x4342;
sub.f16x2 lo, lo, bias;
sub.f16x2 hi, hi, bias;
mov.b32 {$0, $1}, lo;
mov.b32 {$2, $3}, hi;
}
"""

# The same as one tensor: $0 and $1 are the halves of the codes of $2.
INT8_ROWS = """
{
.reg .b32 word, magic, bias;
mov.b32 word, $2;
mov.b32 magic, 0x64646464;
mov.b32 bias, 0x64806480;
prmt.b32 $0, word, magic, 0x4140;
prmt.b32 $1, word, magic, 0x4342;
sub.f16x2 $0, $0, bias;
sub.f16x2 $1, $1, bias;
}
"""

# Nibbles, minus 8, to float16: 1024 + u for the lower ones, 1024 + 16 * u for the upper.
INT4 = """
{
.reg .b32 w, a, b, low, sixteenth, high;
mov.b32 low, 0x64086408;
mov.b32 sixteenth, 0x2c002c00;
mov.b32 high, 0xd480d480;
shr.u32 w, $8, 8;
lop3.b32 a, $8, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, $8, 0x00f000f0, 0x64006400, 0xea;
sub.f16x2 a, a, low;
fma.rn.f16x2 b, b, sixteenth, high;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
lop3.b32 a, w, 0x000f000f, 0x64006400, 0xea;
lop3.b32 b, w, 0x00f000f0, 0x64006400, 0xea;
sub.f16x2 a, a, low;
fma.rn.f16x2 b, b, sixteenth, high;
mov.b32 {$4, $5}, a;
mov.b32 {$6, $7}, b;
}
"""

# E4M3 bytes to float16 by the instruction of compute capability 8.9 and later.
FP8 = """
{
.reg .b16 lo, hi;
.reg .b32 a, b;
mov.b32 {lo, hi}, $4;
cvt.rn.f16x2.e4m3x2 a, lo;
cvt.rn.f16x2.e4m3x2 b, hi;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}
"""

# E4M3 bytes to float16 by their bits: the value times 2^-8, as the exponent biases differ by 8.
FP8_BITS = """
{
.reg .b32 lo, hi, zero, s;
mov.b32 zero, 0;
prmt.b32 lo, $4, zero, 0x1404;
prmt.b32 hi, $4, zero, 0x3424;
and.b32 s, lo, 0x7f007f00;
shr.u32 s, s, 1;
lop3.b32 lo, lo, 0x80008000, s, 0xea;
and.b32 s, hi, 0x7f007f00;
shr.u32 s, s, 1;
lop3.b32 hi, hi, 0x80008000, s, 0xea;
mov.b32 {$0, $1}, lo;
mov.b32 {$2, $3}, hi;
}
"""
