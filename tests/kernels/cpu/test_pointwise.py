"""Norms, rotary embedding and activations of the CPU library against float64."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.kernels.cpu_sections import use_isa

from appliance.kernels.cpu.library import supported_isas
from appliance.kernels.cpu.structs import GatingStruct, Isa, NormStruct, RopeStruct

Array = NDArray[Any]

WIDTHS = (1, 15, 16, 17, 63, 64, 65, 130, 576, 1000, 4096)
# AP_SILU, AP_GELU_TANH
ACTIVATIONS = tuple(map(GatingStruct, (0, 1, 4, 5, 7)))
NAMES = ["silu", "gelu-tanh", "relu", "gelu", "quick-gelu"]
CLAMPED = GatingStruct(2, 7.0, 1.702)
BOUNDED = GatingStruct(6, 3.0)
EPS = 1e-5


@functools.cache
def guarded_pages() -> tuple[mmap.mmap, int, int]:
    """Memory whose end is followed by an inaccessible page: (it, its address, its size)."""
    size, page = 1 << 16, mmap.PAGESIZE
    memory = mmap.mmap(-1, size + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert libc.mprotect(address + size, page, 0) == 0
    return memory, address, size


def at_the_end(x: Array) -> Array:
    """A copy of an array that ends one float before inaccessible memory, with a sentinel there."""
    memory, _, size = guarded_pages()
    whole = np.frombuffer(memory, np.float32, count=size // 4)
    whole[-1] = 12345.0
    placed = whole[-1 - x.size : -1]
    placed[:] = x.ravel()
    return placed


def check_sentinel() -> None:
    memory, _, size = guarded_pages()
    assert np.frombuffer(memory, np.float32, count=size // 4)[-1] == 12345.0


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def norm(
    library: ctypes.CDLL,
    x: Array,
    weight: Array,
    *,
    bias: Array | None = None,
    in_place: bool = False,
) -> Array:
    struct = NormStruct(weight.ctypes.data, EPS, None if bias is None else bias.ctypes.data)
    x = x.copy()
    out = x if in_place else np.full_like(x, np.nan)
    for row, normed in zip(x, out, strict=True):
        library.section_norm(row.ctypes.data, struct, row.size, normed.ctypes.data)
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(library: ctypes.CDLL, width: int) -> None:
    x, weight, bias = numbers(3, width) * 3 + 5, numbers(width, seed=1), numbers(width, seed=2)
    exact = x.astype(np.float64)
    centered = exact - exact.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt((centered**2).mean(axis=1, keepdims=True) + EPS)
    result = norm(library, x, weight, bias=bias)
    np.testing.assert_allclose(result, centered * factor * weight + bias, rtol=0, atol=5e-6)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm(library: ctypes.CDLL, width: int, in_place: bool) -> None:
    x, weight = numbers(3, width) * 3, numbers(width, seed=1)
    exact = x.astype(np.float64)
    factor = 1 / np.sqrt((exact**2).mean(axis=1, keepdims=True) + EPS)
    result = norm(library, x, weight, in_place=in_place)
    np.testing.assert_allclose(result, exact * factor * weight, rtol=6e-7)


def test_rms_norm_of_small_huge_and_broken_rows(library: ctypes.CDLL) -> None:
    x, weight = np.ones((4, 33), np.float32), np.ones(33, np.float32)
    x[0], x[1, 0], x[2, 32], x[3] = 0, np.nan, np.inf, 1e-30
    result = norm(library, x, weight)
    assert (result[0] == 0).all()
    assert np.isnan(result[1]).all()
    assert np.isnan(result[2, 32])
    np.testing.assert_allclose(result[3], 1e-30 / np.sqrt(EPS), rtol=1e-6)


def rotated(library: ctypes.CDLL, heads: Array, rope: RopeStruct, positions: Array) -> Array:
    heads = heads.copy()
    cosine, sine = np.empty((2, rope.rotary_dim // 2), np.float32)
    for row, position in zip(heads, positions.reshape(len(positions), -1), strict=True):
        library.section_angles(rope, position.ctypes.data, cosine.ctypes.data, sine.ctypes.data)
        for head in row:
            library.section_rotate(
                head.ctypes.data, cosine.ctypes.data, sine.ctypes.data, rope.rotary_dim
            )
    return heads


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 32), (128, 96), (48, 20), (256, 256), (16, 2)]
)
def test_rotary_is_a_complex_product(library: ctypes.CDLL, head_dim: int, rotary_dim: int) -> None:
    half, amplitude = rotary_dim // 2, np.float32(1.3)
    frequencies = (10000.0 ** (-np.arange(half) / half)).astype(np.float32)
    positions = np.array([0, 1, 777, 131071], np.int64)
    heads = numbers(4, 3, head_dim)
    rope = RopeStruct(rotary_dim, amplitude, frequencies.ctypes.data)
    result = rotated(library, heads, rope, positions)
    # float32 angles, as the model uses
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    turned = (heads[..., :half] + 1j * heads[..., half:rotary_dim]) * (
        amplitude * np.exp(1j * angles)[:, None]
    )
    expected = np.concatenate((turned.real, turned.imag, heads[..., rotary_dim:]), axis=-1)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-6)
    assert (result[..., rotary_dim:] == heads[..., rotary_dim:]).all()
    assert (rotated(library, heads[2:3], rope, positions[2:3])[0] == result[2]).all()


def gated(
    library: ctypes.CDLL, gate: Array, up: Array, activation: GatingStruct, *, in_place: bool
) -> Array:
    gate = gate.copy()
    out = gate if in_place else np.full_like(gate, np.nan)
    for row, beside, result in zip(gate, up, out, strict=True):
        library.section_gate(
            row.ctypes.data, beside.ctypes.data, activation, row.size, result.ctypes.data
        )
    return out


def activated(gate: Array, activation: GatingStruct) -> Array:
    x = gate.astype(np.float64)
    if activation.activation == 0:
        return np.asarray(x / (1 + np.exp(-x)))
    if activation.activation == 7:
        return np.asarray(x / (1 + np.exp(-1.702 * x)))
    if activation.activation == 4:
        return np.maximum(x, 0)
    if activation.activation == 5:
        return np.asarray(0.5 * x * (1 + np.vectorize(math.erf)(x * math.sqrt(0.5))))
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
@pytest.mark.parametrize("in_place", [False, True])
def test_gated_activation(
    library: ctypes.CDLL, width: int, activation: GatingStruct, in_place: bool
) -> None:
    gate, up = numbers(2, width) * 4, numbers(2, width, seed=1)
    result = gated(library, gate, up, activation, in_place=in_place)
    atol = 6e-6 if activation.activation == 5 else 2e-7  # a polynomial, good to 1.5e-7 of a gate
    np.testing.assert_allclose(result, activated(gate, activation) * up, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_clamped_gates(library: ctypes.CDLL, width: int, in_place: bool) -> None:
    gate, up = numbers(2, width) * 8, numbers(2, width, seed=1) * 8
    gate[1, -1] = np.nan
    result = gated(library, gate, up, CLAMPED, in_place=in_place)
    x = np.minimum(gate.astype(np.float64), 7)
    expected = x / (1 + np.exp(-1.702 * x)) * (np.clip(up, -7, 7) + 1)
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_bounded_gates(library: ctypes.CDLL, width: int, in_place: bool) -> None:
    gate, up = numbers(2, width) * 8, numbers(2, width, seed=1) * 8
    gate[1, -1] = np.nan
    result = gated(library, gate, up, BOUNDED, in_place=in_place)
    x = gate.astype(np.float64)
    expected = np.minimum(x / (1 + np.exp(-x)), 3) * np.clip(up, -3, 3)
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=NAMES)
def test_gates_far_from_zero_and_broken_ones(
    library: ctypes.CDLL, activation: GatingStruct
) -> None:
    gate = np.array([[0.0, -0.0, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, np.nan]], np.float32)
    result = gated(library, gate, np.ones_like(gate), activation, in_place=False)
    with np.errstate(over="ignore"):
        expected = activated(gate[:, :6], activation)
    np.testing.assert_allclose(result[:, :6], expected, rtol=1e-6, atol=1e-11)
    assert result[0, 6] == np.float32(3e38)
    assert abs(result[0, 7]) <= 3
    assert np.isnan(result[0, 8])


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_and_factors_are_exact(library: ctypes.CDLL, width: int) -> None:
    x, y = numbers(width), numbers(width, seed=1)
    total = at_the_end(x)
    library.section_add(total.ctypes.data, y.ctypes.data, width)
    assert (total == x + y).all()
    scaled = at_the_end(x)
    library.section_scale(scaled.ctypes.data, 25.298221, width)
    assert (scaled == x * np.float32(25.298221)).all()
    check_sentinel()


@pytest.mark.parametrize("cap", [30.0, 50.0])
@pytest.mark.parametrize("width", WIDTHS)
def test_softcap(library: ctypes.CDLL, cap: float, width: int) -> None:
    x = numbers(width) * 40
    capped = at_the_end(x)
    library.section_softcap(capped.ctypes.data, cap, width)
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    np.testing.assert_allclose(capped, expected, rtol=1e-6, atol=2e-7 * cap)
    check_sentinel()


def test_softcap_keeps_what_is_not_a_number(library: ctypes.CDLL) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, 3e38, -3e38], np.float32)
    library.section_softcap(x.ctypes.data, 30.0, x.size)
    assert np.isnan(x[0])
    assert x[1:].tolist() == [30, -30, 0, 30, -30]


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_beyond_the_last_element_is_read(library: ctypes.CDLL, width: int) -> None:
    one = numbers(1, width)
    for call in calls_on(library, width):
        x = at_the_end(one)
        call(x)
    check_sentinel()


def calls_on(library: ctypes.CDLL, width: int) -> list[Callable[[Array], None]]:
    """Each entry point, with one of its arguments at the end of its memory."""
    other, out = numbers(width, seed=1), np.empty(width, np.float32)

    def norm_input(x: Array) -> None:
        struct = NormStruct(other.ctypes.data, EPS)
        library.section_norm(x.ctypes.data, struct, width, out.ctypes.data)

    def norm_weight(x: Array) -> None:
        struct = NormStruct(x.ctypes.data, EPS)
        library.section_norm(other.ctypes.data, struct, width, out.ctypes.data)

    def gate(x: Array) -> None:
        library.section_gate(x.ctypes.data, other.ctypes.data, ACTIVATIONS[0], width, x.ctypes.data)

    def up(x: Array) -> None:
        library.section_gate(
            other.ctypes.data, x.ctypes.data, ACTIVATIONS[1], width, out.ctypes.data
        )

    return [norm_input, norm_weight, gate, up]


def test_vector_instruction_sets_agree_bit_for_bit(loaded: ctypes.CDLL) -> None:
    """The scalar path differs, without fused multiply-add."""
    frequencies = (10000.0 ** (-np.arange(40) / 40)).astype(np.float32)
    rope = RopeStruct(80, 1.0, frequencies.ctypes.data)
    results = []
    for isa in supported_isas(loaded):
        if isa is Isa.SCALAR:
            continue
        use_isa(loaded, isa)
        found = [rotated(loaded, numbers(5, 2, 128), rope, np.arange(5) * 9999)]
        for width in WIDTHS:
            gate, up = numbers(4, width) * 6, numbers(4, width, seed=1)
            found.append(norm(loaded, gate, up[0]))
            found += [gated(loaded, gate, up, a, in_place=False) for a in ACTIVATIONS]
            capped = gate[0].copy()
            loaded.section_softcap(capped.ctypes.data, 30.0, width)
            found.append(capped)
        results.append(b"".join(x.tobytes() for x in found))
    assert len(set(results)) <= 1
