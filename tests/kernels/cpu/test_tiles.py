"""Products of tiles: what AMX computes, against the same in plain C and against other kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.kernels.cpu_linears import (
    DENSE,
    DTYPES,
    OUTPUTS,
    Array,
    activations,
    assert_close,
    describe,
    forward,
)
from support.kernels.cpu_sections import CACHED, build_sections, load_sections, use_isa

from appliance.kernels.cpu.library import supported_isas
from appliance.kernels.cpu.structs import Format, Isa, Status

HALVES = [fmt for fmt in DENSE if fmt is not Format.F32]


@pytest.fixture(scope="module")
def emulated() -> ctypes.CDLL:
    """The library with tiles in plain C on every instruction set."""
    path = CACHED.with_name("emulated") / "library.so"
    return load_sections(build_sections(path, ("-DAP_EMULATED_TILES", "-Wno-psabi")))


def multiplied(
    library: ctypes.CDLL, isa: Isa, fmt: Format, weight: torch.Tensor, x: Array
) -> Array:
    use_isa(library, isa)
    engine = library.ap_engine_create(2, 0)
    linear = describe(fmt, *weight.shape)
    status = library.ap_linear_pack(
        engine, linear.struct, weight.data_ptr(), None, None, Format.F32, 0
    )
    assert status == Status.OK
    out = forward(library, engine, linear, x)
    library.ap_engine_destroy(engine)
    return out


@pytest.mark.parametrize("width", [1, 33, 77, 600, 1100])
@pytest.mark.parametrize("fmt", HALVES, ids=lambda f: f.name)
def test_sums_of_parts_are_near_exact_ones_on_every_processor(
    emulated: ctypes.CDLL, fmt: Format, width: int
) -> None:
    random = torch.Generator().manual_seed(width)
    weight = torch.randn((OUTPUTS, width), generator=random).to(DTYPES[fmt])
    x = activations(70, width)
    parts = x.astype(np.float64)[:, None, :] * weight.double().numpy()[None]
    share = 2.0**-17 + (width + 1) * 2.0**-24
    for isa in supported_isas(emulated):
        out = multiplied(emulated, isa, fmt, weight, x)
        assert_close(out, parts.sum(-1), np.abs(parts).sum(-1), share)
        for rows in (1, 2, 3, 4, 16, 33):
            some = multiplied(emulated, isa, fmt, weight, x[:rows])
            assert np.array_equal(some.view(np.int32), out[:rows].view(np.int32)), rows


@pytest.mark.parametrize("exponent", [-149, -130, -120, -110, 100])
@pytest.mark.parametrize("fmt", HALVES, ids=lambda f: f.name)
def test_few_rows_flush_what_tiles_flush(loaded: ctypes.CDLL, fmt: Format, exponent: int) -> None:
    """A few rows are multiplied without tiles, which take denormal numbers for zero."""
    if Isa.AMX not in supported_isas(loaded):
        pytest.skip("this CPU has no AMX, or the system does not permit it")
    random = torch.Generator().manual_seed(0)
    weight = torch.randn((OUTPUTS, 577), generator=random).to(DTYPES[fmt])
    x = np.ldexp(activations(16, 577), exponent).astype(np.float32)
    together = multiplied(loaded, Isa.AMX, fmt, weight, x)
    assert (exponent < -120) or np.abs(together).max() > 0
    for row in range(16):
        alone = multiplied(loaded, Isa.AMX, fmt, weight, x[row : row + 1])
        assert np.array_equal(alone.view(np.int32), together[row : row + 1].view(np.int32))


@pytest.mark.parametrize("rows", [1, 2, 3, 20, 300])
@pytest.mark.parametrize("fmt", HALVES, ids=lambda f: f.name)
def test_the_processor_computes_what_its_manual_says(
    emulated: ctypes.CDLL, loaded: ctypes.CDLL, fmt: Format, rows: int
) -> None:
    if Isa.AMX not in supported_isas(loaded):
        pytest.skip("this CPU has no AMX, or the system does not permit it")
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn((OUTPUTS, 576), generator=random).to(DTYPES[fmt])
    x = activations(rows, 576)
    of_manual = multiplied(emulated, Isa.AMX, fmt, weight, x)
    out = multiplied(loaded, Isa.AMX, fmt, weight, x)
    assert np.array_equal(out.view(np.int32), of_manual.view(np.int32))
