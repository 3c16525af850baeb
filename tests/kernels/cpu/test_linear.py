"""Products of the CPU library's linears, against exact integer sums and sums in order."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.kernels.cpu_linears import (
    DENSE,
    DTYPES,
    GUARD,
    INTEGER,
    NARROW,
    OUTPUTS,
    ROW_COUNTS,
    WIDTHS,
    Array,
    activations,
    assert_close,
    describe,
    exact,
    forward,
    pack,
    packed_weight,
)
from support.kernels.cpu_sections import use_isa
from support.kernels.fp4_weights import random_fp4

from appliance.kernels.cpu.structs import Format, Isa, Offset, ScaleFormat, Status
from appliance.kernels.weights.packed import OffsetKind, PackedWeight


@pytest.fixture
def engine(library: ctypes.CDLL) -> Iterator[int]:
    """An engine of one thread; the number of threads has its own test."""
    handle = library.ap_engine_create(1, 0)
    assert handle
    yield handle
    library.ap_engine_destroy(handle)


@functools.cache
def product(
    fmt: Format, kind: Offset, scale_format: Format, group: int, width: int
) -> tuple[PackedWeight, Array, Array, Array]:
    """A weight, inputs, and the exact product, which is the same for every instruction set."""
    weight = packed_weight(fmt, kind, OUTPUTS, width, group, DTYPES[scale_format])
    x = activations(ROW_COUNTS[-1], width)
    return weight, x, *exact(weight, x)


@pytest.mark.parametrize("group", WIDTHS)
@pytest.mark.parametrize("scale_format", [Format.F16, Format.F32], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", Offset, ids=lambda k: k.name)
@pytest.mark.parametrize("fmt", INTEGER, ids=lambda f: f.name)
def test_integer_weights_are_exact_integer_sums_whatever_the_number_of_rows(
    library: ctypes.CDLL, engine: int, fmt: Format, kind: Offset, scale_format: Format, group: int
) -> None:
    for width in WIDTHS[group]:
        weight, x, expected, magnitude = product(fmt, kind, scale_format, group, width)
        linear = describe(fmt, OUTPUTS, width, kind=kind, scale_format=scale_format, group=group)
        pack(library, engine, linear, weight)
        all_rows = forward(library, engine, linear, x)
        assert_close(all_rows, expected, magnitude)
        for rows in ROW_COUNTS:
            some = forward(library, engine, linear, x[-rows:])
            assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows


@pytest.mark.parametrize("group", WIDTHS)
@pytest.mark.parametrize("kind", Offset, ids=lambda k: k.name)
@pytest.mark.parametrize("scale_format", [Format.F16, Format.F32], ids=lambda f: f.name)
@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_codes_of_few_bits_are_too(
    library: ctypes.CDLL, engine: int, fmt: Format, kind: Offset, scale_format: Format, group: int
) -> None:
    for width in WIDTHS[group]:
        weight, x, expected, magnitude = product(fmt, kind, scale_format, group, width)
        linear = describe(fmt, OUTPUTS, width, kind=kind, scale_format=scale_format, group=group)
        pack(library, engine, linear, weight)
        all_rows = forward(library, engine, linear, x)
        assert_close(all_rows, expected, magnitude)
        for rows in ROW_COUNTS:
            some = forward(library, engine, linear, x[-rows:])
            assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows


@pytest.mark.parametrize("scale_format", [Format.F32, ScaleFormat.E8M0], ids=lambda f: f.name)
def test_4_bit_floats_are_exact_integer_sums_whatever_the_number_of_rows(
    library: ctypes.CDLL, engine: int, scale_format: Format | ScaleFormat
) -> None:
    for width in WIDTHS[32]:
        weight = random_fp4(OUTPUTS, width, torch.float8_e8m0fnu)
        assert len(weight.unpack().unique()) == 16  # all codes
        scale = weight.scale.float() * weight.row_scale[:, None] / 2
        linear = describe(Format.E2M1, OUTPUTS, width, group=32)
        linear.struct.scale_format = scale_format
        if scale_format is ScaleFormat.E8M0:
            weight = replace(weight, row_scale=torch.ones(OUTPUTS))
            scale = weight.scale.float() / 2
        stored = scale if scale_format is Format.F32 else weight.scale.view(torch.uint8)
        status = library.ap_linear_pack(
            engine,
            linear.struct,
            weight.codes.data_ptr(),
            stored.data_ptr(),
            None,
            scale_format,
            32,
        )
        assert status == Status.OK
        row = np.empty(width, np.float32)
        library.section_embedding(linear.struct, OUTPUTS - 1, row.ctypes.data)
        assert np.array_equal(row, weight.dequantize().numpy()[-1])
        twice = (weight.dequantize() / scale.repeat_interleave(32, dim=1)).round()
        middle = torch.full_like(scale, 128)
        whole = PackedWeight(
            (twice + 128).to(torch.uint8), scale, middle, OffsetKind.ZERO_POINT, 8, 32
        )
        x = activations(ROW_COUNTS[-1], width)
        all_rows = forward(library, engine, linear, x)
        assert_close(all_rows, *exact(whole, x))
        for rows in ROW_COUNTS:
            some = forward(library, engine, linear, x[-rows:])
            assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows


def test_bytes_without_scales_are_exact_integer_sums_whatever_the_number_of_rows(
    library: ctypes.CDLL, engine: int
) -> None:
    for width in (16, 48, 576):
        weight = packed_weight(Format.INT8, Offset.CENTERED, OUTPUTS, width, 16, torch.float32)
        weight = replace(weight, scale=torch.ones_like(weight.scale))
        linear = describe(Format.INT8, OUTPUTS, width, group=16)
        linear.struct.scale_format, linear.struct.scales = ScaleFormat.NONE, None
        pack(library, engine, linear, weight)
        row = np.empty(width, np.float32)
        library.section_embedding(linear.struct, OUTPUTS - 1, row.ctypes.data)
        assert np.array_equal(row, weight.codes[-1].numpy() - np.float32(128))
        x = activations(ROW_COUNTS[-1], width)
        all_rows = forward(library, engine, linear, x)
        assert_close(all_rows, *exact(weight, x))
        for rows in ROW_COUNTS:
            some = forward(library, engine, linear, x[-rows:])
            assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows
        for wrong in ({"group": 32}, {"offset_kind": Offset.ADDITIVE}, {"format": Format.INT4}):
            struct = type(linear.struct).from_buffer_copy(linear.struct)
            for name, value in wrong.items():
                setattr(struct, name, value)
            refused = library.ap_linear_pack(
                engine, struct, weight.codes.data_ptr(), None, None, Format.F32, 16
            )
            assert refused == Status.BAD_ARGUMENT, wrong


def multiplies_parts(library: ctypes.CDLL, fmt: Format) -> bool:
    """Return True if inputs are split into bfloat16 parts; see linear_split.h."""
    return library.ap_current_isa() == Isa.AMX and fmt in (Format.F16, Format.BF16)


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
    # the error of an ordered sum is at most a rounding for each of its terms
    share = (in_features + 1) * 2.0**-24
    if multiplies_parts(library, fmt):  # each rounded to eight bits
        share += 2.0**-17
    assert_close(all_rows, parts.sum(-1), np.abs(parts).sum(-1), share)
    for rows in ROW_COUNTS:
        some = forward(library, engine, linear, x[-rows:])
        assert np.array_equal(some.view(np.int32), all_rows[-rows:].view(np.int32)), rows


@pytest.mark.parametrize("fmt", [*INTEGER, *DENSE], ids=lambda f: f.name)
def test_vector_instruction_sets_agree_bit_for_bit(library: ctypes.CDLL, fmt: Format) -> None:
    """The number of threads changes nothing either; plain C differs, without fused multiply-add,
    and so do tiles, which multiply parts of floats."""
    integer = fmt in INTEGER
    kinds = tuple(Offset) if integer else (Offset.CENTERED,)
    here = Isa(library.ap_current_isa())
    x = activations(29, 576)
    for kind in kinds:
        results = []
        for isa in (here, Isa.AVX2 if library.ap_isa_supported(Isa.AVX2) else here):
            use_isa(library, isa)
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
        use_isa(library, here)
        for number, result in enumerate(results):
            if number >= 3 and (here == Isa.SCALAR or (here == Isa.AMX and fmt in DENSE)):
                magnitude = np.abs(results[0]).max(-1, keepdims=True).astype(np.float64)
                assert_close(result, results[0], magnitude, 1e-5)
            else:
                assert np.array_equal(result.view(np.int32), results[0].view(np.int32))


@pytest.mark.parametrize("fmt", [*INTEGER, *DENSE], ids=lambda f: f.name)
def test_more_tiles_than_are_taken_at_once(library: ctypes.CDLL, engine: int, fmt: Format) -> None:
    """Many rows take some tiles, then the next ones; a single row takes all of them."""
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
    x[2] = 1e-42  # subnormal: treated as zero
    x[3, 1] = 1e36  # no float holds this times 255 * 127: treated as not finite
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
