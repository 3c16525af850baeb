"""Linears of the CPU library: packing, single rows, and products against exact integer sums."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from appliance.kernels.cpu.structs import Format, Isa, LinearStruct, Offset, Status
from appliance.kernels.packed import OffsetKind, PackedWeight

Array = NDArray[Any]

ROW_COUNTS = (*range(1, 14), 16, 40, 130, 250)  # every kernel; the last one is the longest
WIDTHS = {32: (32, 96, 576), 64: (64, 192, 576), 128: (128, 1152)}
OUTPUTS = 50  # three tiles and two outputs
GUARD = 64  # elements after an array that nothing may touch
SENTINEL = np.float32(12345.0)

INTEGER = (Format.INT4, Format.INT8)
DENSE = (Format.F32, Format.F16, Format.BF16)
DTYPES = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}


@pytest.fixture
def engine(library: ctypes.CDLL) -> Iterator[int]:
    """Of one thread; the number of threads has its own test."""
    handle = library.ap_engine_create(1, 0)
    assert handle
    yield handle
    library.ap_engine_destroy(handle)


def aligned(nbytes: int) -> Array:
    """Bytes that begin at a multiple of 64, all 0xff: NaN in every float format."""
    whole = np.full(nbytes + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]


@dataclass
class Linear:
    """An ap_linear and all that it points to."""

    struct: LinearStruct
    arrays: tuple[Array | None, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.struct.out_features, self.struct.in_features


def describe(
    fmt: Format,
    out_features: int,
    in_features: int,
    *,
    kind: Offset = Offset.CENTERED,
    scale_format: Format = Format.F32,
    group: int = 0,
    bias: Array | None = None,
) -> Linear:
    """An ap_linear over memory that is to be packed into."""
    padded = -(-out_features // 16) * 16
    bits = {Format.INT4: 4, Format.INT8: 8, Format.F32: 32}.get(fmt, 16)
    codes = aligned(padded * in_features * bits // 8)
    scales = offsets = None
    if group:
        size = padded * (in_features // group) * (2 if scale_format == Format.F16 else 4)
        scales = aligned(size)
        offsets = None if kind == Offset.CENTERED else aligned(size)
    struct = LinearStruct(fmt, kind, scale_format, group, in_features, out_features)
    names = ("codes", "scales", "offsets", "bias")
    arrays = (codes, scales, offsets, bias)
    for name, array in zip(names, arrays, strict=True):
        setattr(struct, name, None if array is None else array.ctypes.data)
    return Linear(struct, arrays)


def pack(library: ctypes.CDLL, engine: int, linear: Linear, weight: PackedWeight) -> None:
    source = {torch.float32: Format.F32, torch.float16: Format.F16, torch.bfloat16: Format.BF16}
    offset = None if linear.struct.offset_kind == Offset.CENTERED else weight.offset.data_ptr()
    status = library.ap_linear_pack(
        engine,
        linear.struct,
        weight.codes.data_ptr(),
        weight.scale.data_ptr(),
        offset,
        source[weight.scale.dtype],
        weight.group_size,
    )
    assert status == Status.OK


def packed_weight(
    fmt: Format, kind: Offset, out_features: int, in_features: int, group: int, dtype: torch.dtype
) -> PackedWeight:
    """Random codes of every value; scales of either sign."""
    random = torch.Generator().manual_seed(out_features * in_features + group)
    bits = 4 if fmt == Format.INT4 else 8
    q = torch.randint(
        0, 1 << bits, (out_features, in_features), generator=random, dtype=torch.uint8
    )
    codes = q[:, 0::2] | (q[:, 1::2] << 4) if bits == 4 else q
    shape = (out_features, in_features // group)
    scale = 0.02 * torch.randn(shape, generator=random) + 0.01
    if kind == Offset.ADDITIVE:
        offset = 0.1 * torch.randn(shape, generator=random)
    elif kind == Offset.ZERO_POINT:
        offset = (1 << bits) * torch.rand(shape, generator=random)
    else:
        offset = torch.full(shape, 1 << (bits - 1))
    additive = kind == Offset.ADDITIVE
    return PackedWeight(
        codes.contiguous(),
        scale.to(dtype),
        offset.to(dtype),
        OffsetKind.ADDITIVE if additive else OffsetKind.ZERO_POINT,
        bits,
        group,
    )


def forward(
    library: ctypes.CDLL, engine: int, linear: Linear, x: Array, expected_status: int = Status.OK
) -> Array:
    """x (rows, in_features) -> (rows, out_features); checks that nothing beyond is written."""
    x = np.ascontiguousarray(x, np.float32)
    count = x.shape[0] * linear.struct.out_features
    out = np.full(count + GUARD, SENTINEL)
    status = library.ap_linear_forward(
        engine, linear.struct, x.ctypes.data, x.shape[0], out.ctypes.data
    )
    assert status == expected_status
    assert np.all(out[count:] == SENTINEL)
    return out[:count].reshape(x.shape[0], -1)


def activations(rows: int, width: int) -> Array:
    """Rows of very different sizes, with outliers."""
    random = np.random.default_rng(width)
    x = random.standard_normal((rows, width)) * np.exp(random.uniform(-8, 8, (rows, 1)))
    x[random.random((rows, width)) < 0.01] *= 30
    return x.astype(np.float32)


def quantize(x: Array) -> tuple[Array, Array]:
    """Codes (rows, width / 16, 16) and scales (rows, width / 16) as the library makes them."""
    grouped = x.reshape(x.shape[0], -1, 16)
    largest = np.abs(grouped).max(-1)
    codes = np.rint(grouped * (np.float32(127) / largest)[..., None]).astype(np.int64)
    scale = largest / np.float32(127)
    return codes, ((scale.view(np.uint32) + 2) & ~np.uint32(3)).view(np.float32)


def exact(weight: PackedWeight, x: Array) -> tuple[Array, Array]:
    """Products of quantized rows by exact integer sums and float64; the sum of magnitudes."""
    codes, row_scale = quantize(x)
    q = weight.unpack().numpy().astype(np.int64).reshape(weight.shape[0], -1, 16)
    dots = np.einsum("rgk,ngk->rng", codes, q, optimize=True)
    sums = codes.sum(-1)[:, None, :]
    repeats = weight.group_size // 16
    scale = weight.scale.double().numpy().repeat(repeats, axis=1)[None]
    offset = weight.offset.double().numpy().repeat(repeats, axis=1)[None]
    if weight.offset_kind is OffsetKind.ADDITIVE:
        parts = np.stack((dots * scale, sums * offset))
    else:
        parts = np.stack((dots * scale, -sums * offset * scale))
    parts *= row_scale.astype(np.float64)[None, :, None, :]
    return parts.sum((0, 3)), np.abs(parts).sum((0, 3))


def assert_close(actual: Array, expected: Array, magnitude: Array, share: float = 2e-6) -> None:
    error = np.abs(actual.astype(np.float64) - expected)
    assert np.all(error <= share * magnitude), float((error / magnitude).max())


@pytest.mark.parametrize("group", WIDTHS)
@pytest.mark.parametrize("scale_format", [Format.F16, Format.F32], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", Offset, ids=lambda k: k.name)
@pytest.mark.parametrize("fmt", INTEGER, ids=lambda f: f.name)
def test_integer_weights_are_exact_integer_sums_whatever_the_number_of_rows(
    library: ctypes.CDLL, engine: int, fmt: Format, kind: Offset, scale_format: Format, group: int
) -> None:
    for width in WIDTHS[group]:
        weight = packed_weight(fmt, kind, OUTPUTS, width, group, DTYPES[scale_format])
        linear = describe(fmt, OUTPUTS, width, kind=kind, scale_format=scale_format, group=group)
        pack(library, engine, linear, weight)
        x = activations(ROW_COUNTS[-1], width)
        all_rows = forward(library, engine, linear, x)
        assert_close(all_rows, *exact(weight, x))
        for rows in ROW_COUNTS:
            some = forward(library, engine, linear, x[-rows:])
            assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows


@pytest.mark.parametrize("in_features", [1, 7, 96, 300])
@pytest.mark.parametrize("fmt", DENSE, ids=lambda f: f.name)
def test_dense_weights_are_sums_in_order_whatever_the_number_of_rows(
    library: ctypes.CDLL, engine: int, fmt: Format, in_features: int
) -> None:
    outputs = 16 * 5 + 3
    random = torch.Generator().manual_seed(in_features)
    weight = torch.randn((outputs, in_features), generator=random).to(DTYPES[fmt])
    linear = describe(fmt, outputs, in_features)
    status = library.ap_linear_pack(
        engine, linear.struct, weight.data_ptr(), None, None, Format.F32, 0
    )
    assert status == Status.OK
    x = activations(ROW_COUNTS[-1], in_features)
    all_rows = forward(library, engine, linear, x)
    parts = x.astype(np.float64)[:, None, :] * weight.double().numpy()[None]
    # a sum in order has an error of at most a rounding for each of its terms
    share = (in_features + 1) * 2.0**-24
    assert_close(all_rows, parts.sum(-1), np.abs(parts).sum(-1), share)
    for rows in ROW_COUNTS:
        some = forward(library, engine, linear, x[-rows:])
        assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows


@pytest.mark.parametrize("fmt", [*INTEGER, *DENSE], ids=lambda f: f.name)
def test_vector_instruction_sets_agree_bit_for_bit(library: ctypes.CDLL, fmt: Format) -> None:
    """And a different number of threads changes nothing; plain C has no fused multiply-add."""
    integer = fmt in INTEGER
    kinds = tuple(Offset) if integer else (Offset.CENTERED,)
    here = library.ap_current_isa()
    x = activations(29, 576)
    for kind in kinds:
        results = []
        for isa in (here, Isa.AVX2 if library.ap_isa_supported(Isa.AVX2) else here):
            assert library.ap_use_isa(isa) == Status.OK
            for threads in (1, 2, 5):
                engine = library.ap_engine_create(threads, 0)
                linear = describe(fmt, OUTPUTS, 576, kind=kind, group=32 * integer)
                if integer:
                    weight = packed_weight(fmt, kind, OUTPUTS, 576, 32, torch.float32)
                    pack(library, engine, linear, weight)
                else:
                    random = torch.Generator().manual_seed(0)
                    dense = torch.randn((OUTPUTS, 576), generator=random).to(DTYPES[fmt])
                    library.ap_linear_pack(
                        engine, linear.struct, dense.data_ptr(), None, None, Format.F32, 0
                    )
                results.append(forward(library, engine, linear, x))
                library.ap_engine_destroy(engine)
        library.ap_use_isa(here)
        for number, result in enumerate(results):
            if here == Isa.SCALAR and number >= 3:
                magnitude = np.abs(results[0]).max(-1, keepdims=True).astype(np.float64)
                assert_close(result, results[0], magnitude, 1e-5)
            else:
                assert np.array_equal(result.view(np.int32), results[0].view(np.int32))


@pytest.mark.parametrize("fmt", [*INTEGER, *DENSE], ids=lambda f: f.name)
def test_more_tiles_than_are_taken_at_once(library: ctypes.CDLL, engine: int, fmt: Format) -> None:
    """Many rows meet some tiles, then the next ones; a single row meets all of them."""
    outputs, width = 16 * 70 + 5, 576
    if fmt in INTEGER:
        linear = describe(fmt, outputs, width, kind=Offset.ZERO_POINT, group=32)
        weight = packed_weight(fmt, Offset.ZERO_POINT, outputs, width, 32, torch.float32)
        pack(library, engine, linear, weight)
    else:
        linear = describe(fmt, outputs, width)
        random = torch.Generator().manual_seed(0)
        dense = torch.randn((outputs, width), generator=random).to(DTYPES[fmt])
        library.ap_linear_pack(engine, linear.struct, dense.data_ptr(), None, None, Format.F32, 0)
    x = activations(14, width)
    together = forward(library, engine, linear, x)
    for row in (0, 13):
        alone = forward(library, engine, linear, x[row : row + 1])
        assert np.array_equal(alone.view(np.int32)[0], together.view(np.int32)[row])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", Offset, ids=lambda k: k.name)
@pytest.mark.parametrize("fmt", INTEGER, ids=lambda f: f.name)
def test_rows_of_a_packed_weight_are_those_of_its_source(
    library: ctypes.CDLL, engine: int, fmt: Format, kind: Offset, dtype: torch.dtype
) -> None:
    """Scales of each source format; a source group that spans several of the tiles' groups."""
    scale_format = Format.F16 if dtype == torch.float16 else Format.F32
    for group, source_group in ((32, 32), (32, 96), (64, 192), (128, 384)):
        weight = packed_weight(fmt, kind, OUTPUTS, 384 * 3 // 2 * 2, source_group, dtype)
        width = weight.shape[1]
        linear = describe(fmt, OUTPUTS, width, kind=kind, scale_format=scale_format, group=group)
        pack(library, engine, linear, weight)
        indices = np.array([OUTPUTS - 1, 0, 17, 17, 15, 16])
        out = np.full((len(indices), width), SENTINEL)
        status = library.ap_linear_rows(
            linear.struct, indices.ctypes.data, len(indices), out.ctypes.data
        )
        assert status == Status.OK
        assert np.array_equal(out, weight.dequantize().numpy()[indices])


@pytest.mark.parametrize("fmt", DENSE, ids=lambda f: f.name)
def test_rows_of_a_dense_weight_are_its_elements(
    library: ctypes.CDLL, engine: int, fmt: Format
) -> None:
    weight = torch.randn((OUTPUTS, 70)).to(DTYPES[fmt])
    weight[3, 5] = 1e-7  # subnormal as float16
    linear = describe(fmt, OUTPUTS, 70)
    library.ap_linear_pack(engine, linear.struct, weight.data_ptr(), None, None, Format.F32, 0)
    indices = np.arange(OUTPUTS)[::-1].copy()
    out = np.full((OUTPUTS, 70), SENTINEL)
    library.ap_linear_rows(linear.struct, indices.ctypes.data, OUTPUTS, out.ctypes.data)
    assert np.array_equal(out, weight.float().numpy()[indices])


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("fmt", [*INTEGER, *DENSE], ids=lambda f: f.name)
def test_what_is_not_finite_makes_its_own_row_nan(
    library: ctypes.CDLL, engine: int, fmt: Format, rows: int
) -> None:
    width = 128
    group = 32 if fmt in INTEGER else 0
    linear = describe(fmt, OUTPUTS, width, kind=Offset.ADDITIVE, group=group)
    if group:
        weight = packed_weight(fmt, Offset.ADDITIVE, OUTPUTS, width, group, torch.float32)
        pack(library, engine, linear, weight)
    else:
        dense = torch.rand((OUTPUTS, width)).to(DTYPES[fmt])
        library.ap_linear_pack(engine, linear.struct, dense.data_ptr(), None, None, Format.F32, 0)
    x = activations(rows, width)
    clean = forward(library, engine, linear, x)
    bad = x.copy()
    bad[0, 77] = np.nan
    if group and rows > 1:
        bad[rows // 2, 3] = np.inf
        bad[-1, -1] = -np.inf
    out = forward(library, engine, linear, bad)
    touched = ~np.isfinite(bad).all(-1)
    assert np.isnan(out[touched]).all()
    assert np.array_equal(out[~touched], clean[~touched])


def test_zero_and_tiny_and_huge_groups(library: ctypes.CDLL, engine: int) -> None:
    weight = packed_weight(Format.INT8, Offset.CENTERED, OUTPUTS, 96, 32, torch.float32)
    linear = describe(Format.INT8, OUTPUTS, 96, group=32)
    pack(library, engine, linear, weight)
    x = activations(6, 96)
    x[0] = 0
    x[1, 32:64] = 0
    x[2] = 1e-42  # subnormal: counts as zero
    x[3, 1] = 1e36  # no float has this times 255 * 127: counts as not finite
    x[4] *= np.float32(2.0**60)
    x[5] *= np.float32(2.0**-60)
    out = forward(library, engine, linear, x)
    assert np.all(out[0] == 0)
    assert np.all(out[2] == 0)
    assert np.isnan(out[3]).all()
    assert_close(out[4:], *exact(weight, x[4:]))
    x[1, 32:64] = 1e-38
    assert np.array_equal(forward(library, engine, linear, x)[1], out[1])


@pytest.mark.parametrize("fmt", [*INTEGER, *DENSE], ids=lambda f: f.name)
def test_bias_is_added_once(library: ctypes.CDLL, engine: int, fmt: Format) -> None:
    group = 32 if fmt in INTEGER else 0
    whole = np.full(OUTPUTS + GUARD, np.nan, np.float32)
    whole[:OUTPUTS] = np.arange(OUTPUTS)
    bias = whole[:OUTPUTS]
    plain = describe(fmt, OUTPUTS, 64, group=group)
    if group:
        weight = packed_weight(fmt, Offset.CENTERED, OUTPUTS, 64, group, torch.float32)
        pack(library, engine, plain, weight)
    else:
        dense = torch.rand((OUTPUTS, 64)).to(DTYPES[fmt])
        library.ap_linear_pack(engine, plain.struct, dense.data_ptr(), None, None, Format.F32, 0)
    x = activations(14, 64)
    without = forward(library, engine, plain, x)
    plain.struct.bias = bias.ctypes.data
    assert np.array_equal(forward(library, engine, plain, x), without + bias)


def test_what_no_kernel_takes_is_refused(library: ctypes.CDLL, engine: int) -> None:
    x = np.zeros((1, 96), np.float32)

    def status(**changes: int | None) -> int:
        linear = describe(Format.INT4, 16, 96, group=32)
        for name, value in changes.items():
            setattr(linear.struct, name, value)
        out = np.zeros((1, 16), np.float32)
        code: int = library.ap_linear_forward(
            engine, linear.struct, x.ctypes.data, 1, out.ctypes.data
        )
        return code

    assert status() == Status.OK
    for changes in (
        {"group": 64},  # does not divide 96
        {"group": 48},
        {"group": 0},
        {"format": 5},
        {"offset_kind": Offset.ADDITIVE},  # without offsets
        {"scale_format": Format.BF16},
        {"scales": None},
        {"codes": None},
    ):
        assert status(**changes) == Status.BAD_ARGUMENT, changes


def test_packing_refuses_groups_that_do_not_fit(library: ctypes.CDLL, engine: int) -> None:
    weight = packed_weight(Format.INT8, Offset.CENTERED, 16, 192, 32, torch.float32)
    linear = describe(Format.INT8, 16, 192, group=32)
    arguments = (weight.codes.data_ptr(), weight.scale.data_ptr(), None)
    for source_format, source_group in (
        (Format.F32, 16),
        (Format.F32, 128),
        (Format.F32, 0),
        (Format.INT8, 32),
    ):
        status = library.ap_linear_pack(
            engine, linear.struct, *arguments, source_format, source_group
        )
        assert status == Status.BAD_ARGUMENT


def test_a_workspace_that_may_not_grow_is_an_error(library: ctypes.CDLL) -> None:
    linear = describe(Format.INT8, 16, 64, group=32)
    engine = library.ap_engine_create(1, 64)
    x = activations(4, 64)
    out = forward(library, engine, linear, x, expected_status=Status.NO_MEMORY)
    assert np.all(out == SENTINEL)
    library.ap_engine_destroy(engine)
