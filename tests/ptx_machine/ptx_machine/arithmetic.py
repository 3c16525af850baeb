"""What instructions on registers compute, for all threads at once.

A function takes the operands' bits as unsigned integers (predicates as booleans) and returns the
result; signed integers are widened by the caller if the register is wider.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import numpy as np

from ptx_machine.conversion import convert
from ptx_machine.numbers import Bits, from_bf16, odd_float32, to_bf16

Values = Any  # an array with a number for each thread, of any type
Function = Callable[..., Values]

_PACKED = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
_FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
_TINY = np.float32(2.0**-126)


@cache
def reader(kind: str) -> Function:
    """Gives the numbers of a type: packed ones side by side, halves widened to float32."""
    if kind in _PACKED:
        narrow, half = reader(_PACKED[kind]), np.dtype("u2" if "16" in kind else "u4")
        return lambda bits: narrow(bits.view(half))
    if kind == "bf16":
        return from_bf16
    if kind == "f16":
        return lambda bits: bits.view(np.float16).astype(np.float32)
    if kind in _FLOATS:
        number = np.dtype(_FLOATS[kind])
        return lambda bits: bits.view(number)
    if kind == "pred":
        return lambda bits: bits
    unsigned = np.dtype(f"uint{kind[1:]}")
    if kind[0] == "s":
        signed = np.dtype(f"int{kind[1:]}")
        return lambda bits: bits.astype(unsigned, copy=False).view(signed)
    return lambda bits: bits.astype(unsigned, copy=False)


@cache
def writer(kind: str) -> Function:
    """The inverse of `reader`; rounds to the nearest, once."""
    if kind in _PACKED:
        narrow, whole = writer(_PACKED[kind]), np.dtype("u4" if "16" in kind else "u8")
        return lambda values: np.ascontiguousarray(narrow(values)).view(whole)
    if kind == "bf16":
        return lambda values: to_bf16(odd_float32(values))
    if kind in _FLOATS:
        to, unsigned = np.dtype(_FLOATS[kind]), np.dtype(f"uint{kind[1:]}")
        return lambda values: values.astype(to, copy=False).view(unsigned)
    return lambda values: values


def flushed(values: Values) -> Values:
    """Subnormal float32 as zeros of their sign."""
    small = np.abs(values) < _TINY
    return np.where(small, np.copysign(np.float32(0), values), values) if small.any() else values


def function_of(parts: list[str]) -> Function:
    """What the instruction with these parts of an opcode computes.

    Raises:
        NotImplementedError: it is unknown.
    """
    head, kind = parts[0], parts[-1]
    if head == "cvt":
        return partial(convert, parts[1:-2], parts[-2], kind)
    if head == "setp":
        return partial(_compare, parts[1], parts[2:-1], kind)
    if parts[:1] + parts[2:] == ["shf", "wrap", "b32"]:
        return partial(_funnel, parts[1] == "l")
    if head in _BITWISE:
        return _BITWISE[head]
    is_integer = kind[1:].isdigit() and kind[0] in "sub"
    if head in _INTEGER and is_integer and len(parts) == 2:
        return partial(_INTEGER[head], kind)
    if head in {"min", "max"} and parts[1:] == ["relu", "s32"]:
        return partial(_not_negative, partial(_INTEGER[head], "s32"))
    if head in {"mul", "mad"} and is_integer and len(parts) == 3:
        return partial(_multiply, parts[1], kind)
    if head in _ANY and len(parts) > 2 and parts[-2] == "f32" and kind in {"f16", "bf16"}:
        return partial(_mixed, _ANY[head], kind)
    if head in _ANY:
        if is_integer or not {*parts[1:-1]} <= {"rn", "approx", "full", "ftz", "NaN"}:
            raise NotImplementedError(".".join(parts))
        nan = "_nan" if "NaN" in parts else ""
        flushes = "ftz" in parts
        if flushes and kind != "f32":
            raise NotImplementedError(".".join(parts))
        return partial(
            _flushing if flushes else _float, _ANY[head + nan], reader(kind), writer(kind)
        )
    raise NotImplementedError(f"no instruction {'.'.join(parts)}")


def _float(operation: Function, read: Function, write: Function, *bits: Bits) -> Values:
    return write(operation(*map(read, bits)))


def _flushing(operation: Function, read: Function, write: Function, *bits: Bits) -> Values:
    return write(flushed(operation(*(flushed(read(one)) for one in bits))))


def _least(smaller: Function, a: Values, b: Values) -> Values:
    """A zero with a sign is smaller than one without."""
    return np.where(a == b, np.where(np.signbit(a), a, b), smaller(a, b))


def _mixed(operation: Function, kind: str, *bits: Bits) -> Values:
    """Of halves, but for the last operand and the result, which are float32."""
    values = map(reader(kind), bits[:-1])
    return writer("f32")(operation(*values, reader("f32")(bits[-1])))


def _fused(a: Values, b: Values, c: Values) -> Values:
    """Of floats of at most 32 bits: in float64, so that to round it once more is exact.

    The product fits; where the sum does not, it is rounded to an odd number.
    """
    if a.dtype == np.float64:
        raise NotImplementedError("fma.f64")
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + c
    # Only halfway between two numbers, or near zero, could it be rounded wrongly again.
    doubtful = (total.view(np.uint64) & np.uint64(0xFFFFFFF) == 0) | (np.abs(total) < _TINY)
    if not doubtful.any():
        return total
    at = total - product
    lost = (product - (total - at)) + (c - at)
    is_even = total.view(np.uint64) & np.uint64(1) == 0
    return np.where(
        (lost != 0) & np.isfinite(total) & is_even,
        np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)),
        total,
    )


def _multiply(part: str, kind: str, a: Bits, b: Bits, c: Bits | None = None) -> Values:
    if part == "lo":
        product = a * b
    else:
        width = int(kind[1:])
        wide = f"{'int' if kind[0] == 's' else 'uint'}{2 * width}"
        read = reader(kind)
        product = read(a).astype(wide) * read(b).astype(wide)
        if part == "hi":
            product = (product >> width).astype(a.dtype)
        product = product.view(f"uint{8 * product.dtype.itemsize}")
    return product if c is None else product + c


def _divide(kind: str, a: Bits, b: Bits) -> Values:
    x, y = map(reader(kind), (a, b))
    y = np.where(y == 0, y.dtype.type(1), y)  # what it gives is not defined
    quotient = x // y
    return quotient + ((x % y != 0) & ((x < 0) ^ (y < 0)))


def _remainder(kind: str, a: Bits, b: Bits) -> Values:
    x, y = map(reader(kind), (a, b))
    return x - _divide(kind, a, b).astype(y.dtype) * y


def _shift(kind: str, left: bool, a: Bits, amount: Bits) -> Values:
    width = int(kind[1:])
    values = reader(kind)(a)
    if amount.max() < width:
        by = amount.astype(values.dtype, copy=False)
        return values << by if left else values >> by
    by = np.minimum(amount, width - 1).astype(values.dtype)
    moved = values << by if left else values >> by
    if kind[0] == "s":
        return moved
    return np.where(amount >= width, values.dtype.type(0), moved)


def _extract(kind: str, a: Bits, start: Bits, length: Bits) -> Values:
    width = int(kind[1:])
    start, length = start & 0xFF, length & 0xFF
    moved = _shift(kind, False, a, start).astype(a.dtype)
    ones = ~np.zeros_like(a)
    field = moved & ~_shift(f"u{width}", True, ones, length)
    if kind[0] == "u":
        return field
    sign_at = np.minimum(start.astype(np.int64) + length - 1, width - 1).astype(a.dtype)
    negative = ((a >> sign_at) & a.dtype.type(1)).astype(bool) & (length > 0)
    return np.where(negative, field | _shift(f"u{width}", True, ones, length), field)


def _insert(kind: str, a: Bits, b: Bits, start: Bits, length: Bits) -> Values:
    start, length = start & 0xFF, length & 0xFF
    ones = ~np.zeros_like(a)
    mask = _shift(kind, True, ~_shift(kind, True, ones, length), start)
    return (b & ~mask) | (_shift(kind, True, a, start) & mask)


def _lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Values:
    """Bit i of the table is the result where the operands' bits, a's first, are the number i."""
    with_a, without = divmod(int(table[0]), 16)
    result = _OF_TWO[without](b, c)
    if with_a == without:
        return result
    return result ^ (a & (result ^ _OF_TWO[with_a](b, c)))


def _permute(a: Bits, b: Bits, selector: Bits) -> Values:
    source = np.stack((a, b), axis=-1).view(np.uint8).ravel()  # 8 bytes of each thread
    nibbles = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    found = source[8 * np.arange(len(a))[:, None] + (nibbles & 7)]
    repeats_sign = nibbles > 7
    if repeats_sign.any():
        found = np.where(repeats_sign, found.view(np.int8) >> 7, found).astype(np.uint8)
    return found.view(np.uint32)[:, 0]


def _funnel(left: bool, low: Bits, high: Bits, amount: Bits) -> Values:
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    by = (amount & np.uint32(31)).astype(np.uint64)
    return ((both << by) >> np.uint64(32) if left else both >> by).astype(np.uint32)


def _bits_set(kind: str, a: Bits) -> Values:
    return np.bitwise_count(a).astype(np.uint32)


def _leading_zeros(kind: str, a: Bits) -> Values:
    width = int(kind[1:])
    places = np.arange(width - 1, -1, -1, dtype=a.dtype)
    is_set = (a[:, None] >> places) & a.dtype.type(1)
    return np.where(is_set.any(1), is_set.argmax(1), width).astype(np.uint32)


def _compare(relation: str, more: list[str], kind: str, a: Bits, b: Bits, *c: Bits) -> Values:
    x, y = map(reader(kind), (a, b))
    is_float = kind.lstrip("b")[0] == "f"
    if {*more} - {"and", "or", "xor"}:
        raise NotImplementedError(f"setp.{'.'.join(more)}")
    if relation in {"num", "nan"}:
        result = np.isnan(x) | np.isnan(y)
        result = result if relation == "nan" else ~result
    elif is_float and relation not in _SIMPLE:
        result = _SIMPLE[relation[:-1]](x, y) | np.isnan(x) | np.isnan(y)
    elif relation == "ne" and is_float:
        result = (x != y) & ~(np.isnan(x) | np.isnan(y))
    else:
        result = _SIMPLE[relation](x, y)
    if c:
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[more[0]]
        result = combine(result, c[0])
    return result


def _signed(operation: Function, kind: str, *bits: Bits) -> Values:
    return operation(*map(reader(kind), bits))


def _not_negative(operation: Callable[..., Values], *bits: Bits) -> Values:
    return np.maximum(operation(*bits), 0)


_SIMPLE: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_OF_TWO: list[Function] = [  # by the results where their bits are the numbers 0 to 3
    lambda b, c: np.zeros_like(b),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    np.bitwise_xor,
    lambda b, c: ~(b & c),
    np.bitwise_and,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    np.bitwise_or,
    lambda b, c: np.full_like(b, -1 & (1 << 8 * b.itemsize) - 1),
]
_BITWISE: dict[str, Function] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "lop3": _lop3,
    "prmt": _permute,
    "selp": lambda a, b, chosen: np.where(chosen, a, b),
}
_INTEGER: dict[str, Callable[..., Values]] = {
    "add": partial(_signed, np.add),
    "sub": partial(_signed, np.subtract),
    "min": partial(_signed, np.minimum),
    "max": partial(_signed, np.maximum),
    "neg": partial(_signed, np.negative),
    "abs": partial(_signed, np.abs),
    "div": _divide,
    "rem": _remainder,
    "shl": lambda kind, a, by: _shift(kind, True, a, by),
    "shr": lambda kind, a, by: _shift(kind, False, a, by),
    "bfe": _extract,
    "bfi": _insert,
    "popc": _bits_set,
    "clz": _leading_zeros,
}
_ANY: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _fused,
    "div": np.divide,
    "min": lambda *values: reduce(partial(_least, np.fmin), values),  # of two or three
    "max": lambda *values: -reduce(partial(_least, np.fmin), [-x for x in values]),
    "min_nan": lambda *values: reduce(partial(_least, np.minimum), values),
    "max_nan": lambda *values: -reduce(partial(_least, np.minimum), [-x for x in values]),
    "neg": np.negative,
    "abs": np.abs,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
}
