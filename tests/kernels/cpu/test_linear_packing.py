"""A packed linear of the CPU library gives its rows back; it refuses wrong sources."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.kernels.cpu_linears import (
    DENSE,
    DTYPES,
    INTEGER,
    NARROW,
    OUTPUTS,
    SENTINEL,
    activations,
    describe,
    forward,
    pack,
    packed_weight,
)

from appliance.kernels.cpu.structs import Format, Offset, Status


@pytest.fixture
def engine(library: ctypes.CDLL) -> Iterator[int]:
    """An engine of one thread; the number of threads has its own test."""
    handle = library.ap_engine_create(1, 0)
    assert handle
    yield handle
    library.ap_engine_destroy(handle)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("kind", Offset, ids=lambda k: k.name)
@pytest.mark.parametrize("fmt", INTEGER, ids=lambda f: f.name)
def test_rows_of_a_packed_weight_are_those_of_its_source(
    library: ctypes.CDLL, engine: int, fmt: Format, kind: Offset, dtype: torch.dtype
) -> None:
    """Covers scales of each source format, and a source group that spans several tile groups."""
    scale_format = Format.F16 if dtype == torch.float16 else Format.F32
    for group, source_group in ((32, 32), (32, 96), (64, 192), (128, 384)):
        weight = packed_weight(fmt, kind, OUTPUTS, 384 * 3 // 2 * 2, source_group, dtype)
        width = weight.shape[1]
        linear = describe(fmt, OUTPUTS, width, kind=kind, scale_format=scale_format, group=group)
        pack(library, engine, linear, weight)
        indices = np.array([OUTPUTS - 1, 0, 17, 17, 15, 16])
        out = np.full((len(indices), width), SENTINEL)
        for row, index in zip(out, indices, strict=True):
            library.section_embedding(linear.struct, index, row.ctypes.data)
        assert np.array_equal(out, weight.dequantize().numpy()[indices])


@pytest.mark.parametrize("kind", Offset, ids=lambda k: k.name)
@pytest.mark.parametrize("fmt", NARROW, ids=lambda f: f.name)
def test_rows_of_a_weight_of_few_bits_are_those_of_its_source(
    library: ctypes.CDLL, engine: int, fmt: Format, kind: Offset
) -> None:
    for group, source_group in ((32, 96), (64, 192), (128, 384)):
        weight = packed_weight(fmt, kind, OUTPUTS, 1152, source_group, torch.float16)
        assert weight.least_bits == NARROW[fmt]
        linear = describe(fmt, OUTPUTS, 1152, kind=kind, scale_format=Format.F16, group=group)
        pack(library, engine, linear, weight)
        out = np.full(1152, SENTINEL)
        for index in (0, 15, 16, OUTPUTS - 1):
            library.section_embedding(linear.struct, index, out.ctypes.data)
            assert np.array_equal(out, weight.dequantize().numpy()[index])


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
    for row, index in zip(out, indices, strict=True):
        library.section_embedding(linear.struct, index, row.ctypes.data)
    assert np.array_equal(out, weight.float().numpy()[indices])


def test_what_no_kernel_takes_is_refused(library: ctypes.CDLL, engine: int) -> None:
    weight = packed_weight(Format.INT4, Offset.CENTERED, 16, 96, 96, torch.float32)

    def status(**changes: int | None) -> int:
        linear = describe(Format.INT4, 16, 96, group=32)
        for name, value in changes.items():
            setattr(linear.struct, name, value)
        sources = (weight.codes.data_ptr(), weight.scale.data_ptr(), weight.offset.data_ptr())
        code: int = library.ap_linear_pack(engine, linear.struct, *sources, Format.F32, 96)
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
