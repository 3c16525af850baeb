"""`cvt`: between types of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_machine.numbers import (
    Bits,
    from_bf16,
    from_e4m3,
    halves,
    joined,
    odd_float32,
    to_bf16,
    to_e4m3,
)

Values = Any  # an array with a number for each thread, of any type

_TO_INTEGERS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def convert(modifiers: list[str], to: str, source: str, *bits: Bits) -> Values:
    """Of two operands the first becomes the upper half."""
    known = {*_TO_INTEGERS, "rn", *(["rna"] if to == "tf32" else [])}
    known |= {"satfinite"} if to.startswith("e4m3") else set()
    if {*modifiers} - known:
        raise NotImplementedError(f"cvt.{'.'.join(modifiers)}.{to}.{source}")
    if len(bits) == 2:
        high, low = (_from_float(modifiers, to.removesuffix("x2"), one, source) for one in bits)
        return joined(low, high)
    if to == "f16x2" and source == "e4m3x2":
        low, high = (from_e4m3(part).astype(np.float16).view(np.uint16) for part in halves(*bits))
        return joined(low, high)
    if to == "e4m3x2" and source == "f16x2":
        low, high = (to_e4m3(part.view(np.float16).astype(np.float32)) for part in halves(*bits))
        return joined(low, high)
    if source in _FROM:
        return _from_float(modifiers, to, bits[0], source)
    width = int(source[1:])
    values = bits[0].astype(f"uint{width}")
    if source[0] == "s":
        values = values.view(f"int{width}")
    if to in {"f32", "f64"} or (to == "f16" and width < 64):
        return _TO[to](values)
    return values.astype(f"{'int' if to[0] == 's' else 'uint'}{to[1:]}")


def _from_float(modifiers: list[str], to: str, bits: Bits, source: str) -> Values:
    values = _FROM[source](bits)
    rounding = next((_TO_INTEGERS[one] for one in modifiers if one in _TO_INTEGERS), None)
    if rounding is not None:
        values = rounding(values)
    if to in _TO:
        return _TO[to](values)
    assert rounding is not None, modifiers
    limits = np.iinfo(f"{'int' if to[0] == 's' else 'uint'}{to[1:]}")
    inside = np.clip(values, float(limits.min), float(limits.max))
    # The largest of 64 bits is no float: what reaches it is set by hand.
    fits = inside < float(limits.max)
    result = np.where(fits, np.where(fits, inside, 0).astype(limits.dtype), limits.max)
    sign = limits.dtype.type(1 << limits.bits - 1 if to[0] == "u" else limits.min)
    of_nan = sign if source == "f64" or limits.bits == 64 else limits.dtype.type(0)
    return np.where(np.isnan(values), of_nan, result)


def _to_tf32(values: Values) -> Values:
    """To 10 bits of mantissa, ties away from zero."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), rounded)


_FROM = {
    "f64": lambda bits: bits.view(np.float64),
    "f32": lambda bits: bits.view(np.float32),
    "f16": lambda bits: bits.view(np.float16).astype(np.float32),
    "bf16": from_bf16,
}
_TO = {
    "f64": lambda values: values.astype(np.float64).view(np.uint64),
    "f32": lambda values: values.astype(np.float32).view(np.uint32),
    "f16": lambda values: values.astype(np.float16).view(np.uint16),
    "bf16": lambda values: to_bf16(odd_float32(values)),
    "e4m3": lambda values: to_e4m3(odd_float32(values)),
    "tf32": _to_tf32,
}
