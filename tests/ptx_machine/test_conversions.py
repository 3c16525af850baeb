from __future__ import annotations

import numpy as np
import pytest
import torch
from ptx_machine.inline import Array, evaluate

ALL_HALVES = np.arange(1 << 16, dtype=np.uint16)
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def through_torch(bits: Array, source: torch.dtype, to: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits).view(source).to(to)


def same_as_torch(found: Array, expected: torch.Tensor) -> None:
    values = torch.from_numpy(found).view(expected.dtype)
    is_nan = expected.isnan()
    assert torch.equal(values.isnan(), is_nan)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    assert torch.equal(values.view(whole)[~is_nan], expected.view(whole)[~is_nan])


@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_all_halves_are_widened(source: str) -> None:
    (found,) = evaluate(f"cvt.f32.{source} $0, $1;", [32], ALL_HALVES)
    same_as_torch(found, through_torch(ALL_HALVES, TORCH[source], torch.float32))
    for kind in ("s16", "s32", "u32", "s64"):
        check_rounded(source, kind, ALL_HALVES)


def check_rounded(source: str, kind: str, bits: Array) -> None:
    """Check conversions to integers: clamped; NaN becomes 0 or the sign bit alone."""
    width = int(kind[1:])
    low = -(1 << width - 1) if kind[0] == "s" else 0
    high = low + (1 << width) - 1
    values = through_torch(bits, TORCH[source], torch.float64).tolist()
    of_nan = 1 << width - 1 if source == "f64" or width == 64 else 0
    for mode, rounded in (("rzi", np.trunc), ("rni", np.rint), ("rmi", np.floor), ("rpi", np.ceil)):
        (found,) = evaluate(f"cvt.{mode}.{kind}.{source} $0, $1;", [width], bits)
        for value, result in zip(values, found.tolist(), strict=True):
            if value != value:
                expected = of_nan
            elif np.isinf(value):
                expected = high if value > 0 else low
            else:
                expected = min(max(int(rounded(value)), low), high)
            assert result == expected & (1 << width) - 1, (mode, kind, value)


def any_floats(source: str) -> Array:
    """Random bits, values halfway between two 16-bit numbers, and their neighbours."""
    width = {"f32": 32, "f64": 64}[source]
    random = np.random.default_rng(0)
    bits = random.integers(0, 1 << width, 4000, dtype=f"uint{width}")
    numbers = torch.from_numpy(ALL_HALVES[::7].astype(np.int16))
    ties = []
    for dtype in (torch.float16, torch.bfloat16):
        one = numbers.view(dtype).to(TORCH[source])
        next_one = (numbers + 1).view(dtype).to(TORCH[source])
        ties.append((one / 2 + next_one / 2).numpy())
    near = np.random.default_rng(1).standard_normal(4000).astype(ties[0].dtype) * 100
    half = np.concatenate([*ties, near]).view(bits.dtype)
    return np.concatenate([bits, half, half + 1, half - 1])


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats_are_narrowed(source: str) -> None:
    bits = any_floats(source)
    if source == "f32":
        for to in ("f16", "bf16"):
            (found,) = evaluate(f"cvt.rn.{to}.f32 $0, $1;", [16], bits)
            same_as_torch(found, through_torch(bits, torch.float32, TORCH[to]))
            (pair,) = evaluate(f"cvt.rn.{to}x2.f32 $0, $1, $2;", [32], bits, bits[::-1].copy())
            assert np.array_equal(pair >> 16, found)
            assert np.array_equal(pair & 0xFFFF, found[::-1])
        (found,) = evaluate("cvt.f64.f32 $0, $1;", [64], bits)
        same_as_torch(found, through_torch(bits, torch.float32, torch.float64))
    else:
        (found,) = evaluate("cvt.rn.f32.f64 $0, $1;", [32], bits)
        same_as_torch(found, through_torch(bits, torch.float64, torch.float32))
        (found,) = evaluate("cvt.rn.f16.f64 $0, $1;", [16], bits)
        expected = bits.view(np.float64).astype(np.float16)
        same_as_torch(found, torch.from_numpy(expected))
        (found,) = evaluate("cvt.rpi.f64.f64 $0, $1;", [64], bits)
        same_as_torch(found, torch.from_numpy(np.ceil(bits.view(np.float64))))
    for kind in ("s8", "s16", "u16", "s32", "u32", "s64", "u64"):
        check_rounded(source, kind, bits[::11])


def test_a_float64_is_rounded_once_to_bf16() -> None:
    tie = 1 + 2.0**-8
    numbers = np.array([tie, tie + 2.0**-40, tie - 2.0**-40, -tie - 2.0**-40])
    (found,) = evaluate("cvt.rn.bf16.f64 $0, $1;", [16], numbers)
    values = torch.from_numpy(found).view(torch.bfloat16).tolist()
    assert values == [1, 1 + 2.0**-7, 1, -1 - 2.0**-7]


def test_tf32_rounds_ties_away_from_zero() -> None:
    step = 2.0**-10
    numbers = np.array(
        [1, 1 + step / 2, -1 - step / 2, 1 + 0.49 * step, np.inf, 3e-41, 1 + step], np.float32
    )
    (found,) = evaluate("cvt.rna.tf32.f32 $0, $1;", [32], numbers)
    values = found.view(np.float32).tolist()
    assert values[:5] == [1, 1 + step, -1 - step, 1, np.inf]
    assert values[6] == 1 + step
    (found,) = evaluate(
        "cvt.rna.tf32.f32 $0, $1;", [32], np.array([0x7FFFFFFF, 0xFFC00000], np.uint32)
    )
    assert np.isnan(found.view(np.float32)).all()


def test_all_e4m3_codes() -> None:
    (found,) = evaluate("cvt.rn.f16x2.e4m3x2 $0, $1;", [32], ALL_HALVES)
    for half, codes in ((found & 0xFFFF, ALL_HALVES & 0xFF), (found >> 16, ALL_HALVES >> 8)):
        expected = through_torch(codes.astype(np.uint8), torch.float8_e4m3fn, torch.float16)
        same_as_torch(half.astype(np.uint16), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_to_e4m3() -> None:
    def expected(values: torch.Tensor) -> torch.Tensor:
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)

    words = ALL_HALVES.astype(np.uint32) | ALL_HALVES[::-1].astype(np.uint32) << 16
    (found,) = evaluate("cvt.rn.satfinite.e4m3x2.f16x2 $0, $1;", [16], words)
    halves = through_torch(ALL_HALVES, torch.float16, torch.float32)
    same_as_torch((found & 0xFF).astype(np.uint8), expected(halves))
    same_as_torch((found >> 8).astype(np.uint8), expected(halves.flip(0)))
    bits = any_floats("f32")
    (found,) = evaluate("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", [16], bits, bits[::-1].copy())
    values = torch.from_numpy(bits).view(torch.float32)
    same_as_torch((found >> 8).astype(np.uint8), expected(values))
    same_as_torch((found & 0xFF).astype(np.uint8), expected(values.flip(0)))


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers(source: str) -> None:
    width, is_signed = int(source[1:]), source[0] == "s"
    random = np.random.default_rng(0)
    edges = np.array([0, 1, (1 << width - 1) - 1, 1 << width - 1, (1 << width) - 1], np.uint64)
    some = random.integers(0, 1 << 64, 500, dtype=np.uint64)
    some = np.concatenate([edges, some >> np.uint64(64 - width), some % 99])
    words = some.astype(f"u{width // 8}")
    numbers = words.view(f"i{width // 8}") if is_signed else words
    held = words.astype(np.uint16) if width == 8 else words  # no register has 8 bits
    for to, dtype in (("f32", np.float32), ("f64", np.float64), ("f16", np.float16)):
        if to == "f16" and width == 64:
            continue
        (found,) = evaluate(f"cvt.rn.{to}.{source} $0, $1;", [np.finfo(dtype).bits], held)
        with np.errstate(over="ignore"):
            assert np.array_equal(found.view(dtype), numbers.astype(dtype))
    for to in ("u16", "s16", "u32", "s32", "u64", "s64"):
        result = int(to[1:])
        (found,) = evaluate(f"cvt.{to}.{source} $0, $1;", [result], held)
        for value, word in zip(numbers.tolist(), found.tolist(), strict=True):
            assert word == value & (1 << result) - 1
