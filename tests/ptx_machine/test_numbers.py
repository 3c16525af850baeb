from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from ptx_machine.inline import Array, bits_of, evaluate

Integers = list[int]


def operands(width: int, count: int, size: int = 400) -> list[Array]:
    """Columns of extreme, of random and of small integers."""
    random = np.random.default_rng(width)
    top = 1 << width - 1
    extremes = [0, 1, 2, 7, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 31, 32, 33, 63, 64]
    columns = []
    for _ in range(count):
        wide = random.integers(0, 1 << 64, size, dtype=np.uint64, endpoint=False)
        small = random.integers(0, 70, size, dtype=np.uint64)
        edges = random.choice(np.array(extremes, dtype=np.uint64), size)
        mixed = np.choose(random.integers(0, 3, size), (wide, small, edges))
        columns.append(mixed.astype(f"uint{width}"))
    return columns


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> width - 1 else value


def shifted(value: int, by: int, width: int) -> int:
    """Shift to the right, by at most all bits."""
    return value >> min(by, width)


def divided(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(value: int, start: int, length: int, width: int, *, has_sign: bool) -> int:
    """A bit field as the PTX ISA defines it, bit by bit."""
    start, length, last = start & 255, length & 255, width - 1
    sign = value >> min(start + length - 1, last) & 1 if has_sign and length else 0
    bits = [
        value >> start + i & 1 if i < length and start + i <= last else sign for i in range(width)
    ]
    return sum(bit << i for i, bit in enumerate(bits))


def inserted(a: int, b: int, start: int, length: int, width: int) -> int:
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < width:
            b = b & ~(1 << start + i) | (a >> i & 1) << start + i
    return b


Model = Callable[..., int]
BINARY: dict[str, Model] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": min,
    "max": max,
    "div": divided,
    "rem": lambda a, b: a - divided(a, b) * b,
    "mul.lo": lambda a, b: a * b,
}


def check(opcode: str, result: int, columns: Sequence[Array], model: Model, sign: int = 0) -> None:
    """Compare with a model on Python's integers, signed ones of `sign` bits unless that is 0."""
    names = ", ".join(f"${i + 1}" for i in range(len(columns)))
    (found,) = evaluate(f"{opcode} $0, {names};", [result], *columns)
    for i, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        numbers = [signed(value, sign) for value in values] if sign else list(values)
        expected = model(*numbers) & (1 << result) - 1
        assert int(found[i]) == expected, (opcode, values)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", BINARY)
def test_integer_arithmetic(name: str, kind: str) -> None:
    width = int(kind[1:])
    a, b = operands(width, 2)
    if name in {"div", "rem"}:
        b = np.where(b == 0, b.dtype.type(3), b)
    check(f"{name}.{kind}", width, (a, b), BINARY[name], width if kind[0] == "s" else 0)


@pytest.mark.parametrize("name", ["min", "max"])
def test_results_that_would_be_negative_may_become_0(name: str) -> None:
    choose = BINARY[name]
    columns = operands(32, 2)
    check(f"{name}.relu.s32", 32, columns, lambda a, b: max(choose(a, b), 0), 32)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products(kind: str) -> None:
    width = int(kind[1:])
    sign = width if kind[0] == "s" else 0
    a, b, c = operands(width, 3)
    check(f"mul.hi.{kind}", width, (a, b), lambda x, y: x * y >> width, sign)
    check(f"mul.wide.{kind}", 2 * width, (a, b), lambda x, y: x * y, sign)
    check(f"mad.lo.{kind}", width, (a, b, c), lambda x, y, z: x * y + z, sign)
    (d,) = operands(2 * width, 1)
    (found,) = evaluate(f"mad.wide.{kind} $0, $1, $2, $3;", [2 * width], a, b, d)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), d.tolist(), strict=True)):
        product = signed(x, width) * signed(y, width) if sign else x * y
        assert int(found[i]) == product + z & (1 << 2 * width) - 1


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_beyond_the_width(width: int) -> None:
    (a,), (by,) = operands(width, 1), operands(32, 1)
    check(f"shl.b{width}", width, (a, by), lambda x, n: x << min(n, width))
    check(f"shr.u{width}", width, (a, by), lambda x, n: shifted(x, n, width))
    check(f"shr.s{width}", width, (a, by), lambda x, n: shifted(signed(x, width), n, width))


@pytest.mark.parametrize("width", [32, 64])
def test_bit_fields(width: int) -> None:
    a, b = operands(width, 2)
    start, length = operands(32, 2)
    for kind in "us":
        check(f"bfe.{kind}{width}", width, (a, start, length),
              lambda x, s, n, k=kind: field(x, s, n, width, has_sign=k == "s"))  # fmt: skip
    check(f"bfi.b{width}", width, (a, b, start, length),
          lambda x, y, s, n: inserted(x, y, s, n, width))  # fmt: skip
    check(f"popc.b{width}", 32, (a,), lambda x: x.bit_count())
    check(f"clz.b{width}", 32, (a,), lambda x: width - x.bit_length())


@pytest.mark.parametrize("width", [16, 32, 64])
def test_signs(width: int) -> None:
    (a,) = operands(width, 1)
    check(f"neg.s{width}", width, (a,), lambda x: -x, width)
    check(f"abs.s{width}", width, (a,), abs, width)
    check(f"not.b{width}", width, (a,), lambda x: ~x)


def test_funnel_shifts() -> None:
    low, high, by = operands(32, 3)

    def both(a: int, b: int) -> int:
        return a | b << 32

    check("shf.l.wrap.b32", 32, (low, high, by), lambda a, b, n: both(a, b) << (n & 31) >> 32)
    check("shf.r.wrap.b32", 32, (low, high, by), lambda a, b, n: both(a, b) >> (n & 31))


def test_all_tables_of_lop3() -> None:
    a, b, c = operands(32, 3, 64)
    text = "".join(f"lop3.b32 ${i}, $256, $257, $258, {i};\n" for i in range(256))
    found = evaluate(text, [32] * 256, a, b, c)
    for table, words in enumerate(found):
        expected = np.zeros_like(a)
        for bit in range(32):
            row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
            expected = expected | (table >> row & 1).astype(np.uint32) << bit
        assert np.array_equal(words, expected), table


def test_bytes_are_permuted_and_their_signs_spread() -> None:
    def model(a: int, b: int, selector: int) -> int:
        pool, result = (a | b << 32).to_bytes(8, "little"), []
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = pool[nibble & 7]
            result.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        return int.from_bytes(bytes(result), "little")

    a, b, selector = operands(32, 3, 2000)
    check("prmt.b32", 32, (a, b, selector), model)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64", "b32"])
def test_comparisons_of_integers(kind: str) -> None:
    width = int(kind[1:])
    a, b = operands(width, 2)
    b[::3] = a[::3]
    x, y = (column.view(f"int{width}") if kind[0] == "s" else column for column in (a, b))
    relations = {"eq": x == y, "ne": x != y}
    if kind[0] != "b":
        relations |= {"lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    chosen = a % 2 == 0
    for relation, expected in relations.items():
        (found,) = evaluate(f"setp.{relation}.{kind} $0, $1, $2;", [1], a, b)
        assert np.array_equal(found, expected)
        for name, combine in (("and", np.logical_and), ("or", np.logical_or)):
            text = f"setp.{relation}.{name}.{kind} $0, $1, $2, $3;"
            (found,) = evaluate(text, [1], a, b, chosen)
            assert np.array_equal(found, combine(expected, chosen))


def floats(dtype: Any, count: int, size: int = 4000) -> list[Array]:
    """Columns of all magnitudes, close to each other, special, subnormal and with few bits."""
    random = np.random.default_rng(count)
    info = np.finfo(dtype)
    special = np.array(
        [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, info.max, -info.max, info.tiny,
         -info.tiny, info.smallest_subnormal, info.tiny / 2, 1 + info.eps], dtype
    )  # fmt: skip
    columns = []
    for _ in range(count):
        bits = random.integers(0, 1 << info.bits, size, dtype=f"uint{info.bits}")
        any_bits = bits.view(dtype)
        few = (bits >> (bits.dtype.type(random.integers(0, info.nmant)))
               << bits.dtype.type(info.nmant - 3)).view(dtype)  # fmt: skip
        near = (1 + random.standard_normal(size)).astype(dtype)
        choices = (any_bits, few, near, random.choice(special, size))
        columns.append(np.choose(random.integers(0, 4, size), choices).astype(dtype))
    return columns


def same(found: Array, expected: Array) -> None:
    """Assert equality to the bit, except the bits of NaN."""
    expected = np.asarray(expected)
    values = found.view(expected.dtype)
    is_nan = np.isnan(expected)
    assert np.array_equal(np.isnan(values), is_nan)
    assert np.array_equal(found[~is_nan], bits_of(expected)[~is_nan])


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("packed", [False, True])
def test_fused_products_are_rounded_once(kind: str, packed: bool) -> None:
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    width = torch.finfo(dtype).bits
    random = np.random.default_rng(0)
    bits = [random.integers(0, 1 << width, 1600, dtype=f"uint{width}") for _ in range(3)]
    a, b, c = (torch.from_numpy(one).view(dtype) for one in bits)
    eps = torch.finfo(dtype).eps
    for part in (a, b, c):
        part[:1200] = (1 + torch.from_numpy(random.random(1200))).to(dtype)
    # Next to halfway between two numbers a far smaller addend decides.
    a[:300], b[:300] = 1 + 2 * eps, 1 + eps / 2
    c[:300] = torch.ldexp(c[:300].double(), -torch.arange(300) // 5).to(dtype)
    a[300:600] = a[300:600] * eps / 4
    a[600:900], b[600:900] = eps / 2, 1 + eps
    c[900:1000] = torch.finfo(dtype).smallest_normal * torch.arange(-50, 50)
    suffix, held = kind + ("x2" if packed else ""), f"uint{2 * width if packed else width}"
    (found,) = evaluate(
        f"fma.rn.{suffix} $0, $1, $2, $3;", [int(held[4:])], *(one.view(held) for one in bits)
    )
    values = torch.from_numpy(found.view(bits[0].dtype)).view(dtype)
    is_finite = a.isfinite() & b.isfinite() & c.isfinite()
    for i in is_finite.nonzero().flatten().tolist():
        x, y, z = (Fraction(part[i].item()) for part in (a, b, c))
        assert values[i].item() == nearest(x * y + z, dtype), (x, y, z)
    wide = (a.double() * b.double() + c.double())[~is_finite]
    assert torch.equal(values[~is_finite].isnan(), wide.isnan())


@pytest.mark.parametrize(
    ("kind", "a", "b", "least"),
    [
        ("f32", 97, 172961 * 2.0**-24, 2.0**-80),
        ("f16", 3, 683 * 2.0**-11, 2.0**-24),
        ("bf16", 7, 37 * 2.0**-8, 2.0**-80),
    ],
)
def test_what_is_small_decides_between_two(kind: str, a: int, b: float, least: float) -> None:
    """The product is halfway between two numbers, and a wider float would round the sum to it."""
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    width = torch.finfo(dtype).bits
    columns = torch.tensor([[a] * 3, [b] * 3, [least, -least, 0]]).to(dtype)
    bits = [bits_of(column.view(getattr(torch, f"int{width}")).numpy()) for column in columns]
    (found,) = evaluate(f"fma.rn.{kind} $0, $1, $2, $3;", [width], *bits)
    exact = Fraction(a) * Fraction(b)
    expected = [nearest(exact + sign * Fraction(least), dtype) for sign in (1, -1, 0)]
    assert torch.from_numpy(found).view(dtype).tolist() == expected
    assert expected[0] > expected[1]


def nearest(exact: Fraction, dtype: torch.dtype) -> float:
    """Round to the nearest, ties to even, with integer arithmetic."""
    info = torch.finfo(dtype)
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    power = max(Fraction(2) ** exponent, Fraction(info.smallest_normal))
    step = power * Fraction(info.eps)
    rounded = round(exact / step) * step  # Python rounds halves to even
    if abs(rounded) > Fraction(info.max):
        return float(np.copysign(np.inf, float(exact)))
    return float(rounded)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_float_arithmetic() -> None:
    a, b = floats(np.float32, 2)
    for name, expected in (("add", a + b), ("sub", a - b), ("mul", a * b), ("div.rn", a / b)):
        same(evaluate(f"{name}.f32 $0, $1, $2;", [32], a, b)[0], expected)
    same(evaluate("neg.f32 $0, $1;", [32], a)[0], -a)
    same(evaluate("abs.f32 $0, $1;", [32], a)[0], abs(a))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_arithmetic_of_halves(kind: str) -> None:
    dtype = torch.float16 if kind == "f16" else torch.bfloat16
    random = np.random.default_rng(0)
    bits = [random.integers(0, 1 << 16, 4000, dtype=np.uint16) for _ in range(2)]
    a, b = (torch.from_numpy(one).view(dtype) for one in bits)
    for name, expected in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        found = evaluate(f"{name}.{kind} $0, $1, $2;", [16], *bits[:2])[0]
        packed = [one.view(np.uint32) for one in bits]
        pairs = evaluate(f"{name}.{kind}x2 $0, $1, $2;", [32], *packed[:2])[0].view(np.uint16)
        for result in (found, pairs):
            values = torch.from_numpy(result).view(dtype)
            torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    words = np.random.default_rng(1).standard_normal(4000).astype(np.float32)
    (found,) = evaluate(f"add.rn.f32.{kind} $0, $1, $2;", [32], bits[0], words)
    same(found, (a.float() + torch.from_numpy(words)).numpy())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_least_and_the_largest() -> None:
    a, b = floats(np.float32, 2)
    for name, choose, sign in (("min", np.fmin, 1), ("max", np.fmax, 0)):
        expected = np.asarray(choose(a, b))
        zeros = (a == 0) & (b == 0)
        negative = (np.signbit(a) | np.signbit(b)) if sign else (np.signbit(a) & np.signbit(b))
        expected = np.where(zeros, np.where(negative, np.float32(-0.0), np.float32(0)), expected)
        same(evaluate(f"{name}.f32 $0, $1, $2;", [32], a, b)[0], expected)
        with_nan = np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), expected)
        same(evaluate(f"{name}.NaN.f32 $0, $1, $2;", [32], a, b)[0], with_nan)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_subnormals_are_flushed() -> None:
    a, b = floats(np.float32, 2)
    tiny = np.finfo(np.float32).tiny

    def flush(x: Array) -> Array:
        return np.where(abs(x) < tiny, np.copysign(np.float32(0), x), x)

    assert (flush(a) != a).sum() > 100
    same(evaluate("mul.ftz.f32 $0, $1, $2;", [32], a, b)[0], flush(flush(a) * flush(b)))
    same(evaluate("add.ftz.f32 $0, $1, $2;", [32], a, b)[0], flush(flush(a) + flush(b)))
    (found,) = evaluate(
        "ex2.approx.ftz.f32 $0, $1;", [32], np.array([-127, -126, 0, 3, 1e-40], np.float32)
    )
    assert found.view(np.float32).tolist() == [0, tiny, 1, 8, 1]


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_comparisons_of_floats(kind: str) -> None:
    if kind == "bf16":
        random = np.random.default_rng(0)
        bits = [random.integers(0, 1 << 16, 4000, dtype=np.uint16) for _ in range(2)]
        bits[0][:400] = 0x7FC0
        a, b = (torch.from_numpy(one).view(torch.bfloat16).float().numpy() for one in bits)
    else:
        a, b = floats({"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind], 2)
        b[::3] = a[::3]
        bits = [bits_of(a), bits_of(b)]
    nan = np.isnan(a) | np.isnan(b)
    relations = {
        "eq": a == b, "ne": (a != b) & ~nan, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b,
        "equ": (a == b) | nan, "neu": (a != b) | nan, "ltu": (a < b) | nan, "leu": (a <= b) | nan,
        "gtu": (a > b) | nan, "geu": (a >= b) | nan, "num": ~nan, "nan": nan,
    }  # fmt: skip
    assert nan.any()
    for relation, expected in relations.items():
        (found,) = evaluate(f"setp.{relation}.{kind} $0, $1, $2;", [1], *bits)
        assert np.array_equal(found, expected), relation
