"""Products with GGML's types, in the layout of GGUF files, against exact integer sums."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf.ggml_weights import random_ggml
from support.kernels.cpu_linears import (
    OUTPUTS,
    SENTINEL,
    Array,
    Linear,
    activations,
    aligned,
    assert_close,
    describe,
    forward,
    quantize,
)
from support.kernels.cpu_sections import use_isa

from appliance.kernels.cpu.structs import Format, Isa, ScaleFormat, Status
from appliance.kernels.cpu.weight_bytes import linear_bytes
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES, Decoded

ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 29)


class GuardedArena:
    """Separate memory for each tensor, filled with NaN in every format."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []

    def claim(self, nbytes: int) -> int:
        self.arrays.append(aligned(nbytes))
        return int(self.arrays[-1].ctypes.data)


def packed(library: ctypes.CDLL, engine: int, weight: GgmlWeight) -> Linear:
    arena: Any = GuardedArena()
    native: Any = SimpleNamespace(library=library, handle=engine)
    struct = WeightPacker(native, arena, torch.float32).linear(weight)
    return Linear(struct, tuple(arena.arrays))


def widths(name: str) -> tuple[int, ...]:
    return (256, 768) if GGML_TYPES[name].block_size == 256 else (32, 288, 576)


def exact(decoded: Decoded, x: Array) -> tuple[Array, Array]:
    """Products of quantized rows by exact integer sums and float64; the sum of magnitudes."""
    codes, row_scale = quantize(x)
    q = decoded.codes.numpy().astype(np.int64).reshape(len(decoded.codes), -1, 16)
    repeats = q.shape[1] // decoded.scale.shape[1]

    def spread(values: torch.Tensor) -> Array:
        return values.double().numpy().repeat(repeats, axis=1)[None]

    parts = [np.einsum("rgk,ngk->rng", codes, q, optimize=True) * spread(decoded.scale)]
    if decoded.offset is not None:
        parts.append(codes.sum(-1)[:, None, :] * spread(decoded.offset))
    scaled = np.stack(parts) * row_scale.astype(np.float64)[None, :, None, :]
    return scaled.sum((0, 3)), np.abs(scaled).sum((0, 3))


@pytest.mark.parametrize("name", GGML_TYPES)
def test_types_are_exact_integer_sums_whatever_the_number_of_rows(
    library: ctypes.CDLL, single: int, name: str
) -> None:
    for width in widths(name):
        weight = random_ggml(name, OUTPUTS, width)
        linear = packed(library, single, weight)
        x = activations(ROWS[-1], width)
        together = forward(library, single, linear, x)
        assert_close(together, *exact(weight.decode(), x))
        for rows in ROWS:
            some = forward(library, single, linear, x[-rows:])
            assert np.array_equal(some.view(np.int32), together[-rows:].view(np.int32)), rows


@pytest.mark.parametrize("name", GGML_TYPES)
def test_rows_are_what_the_type_means_and_take_the_memory_of_the_file(
    library: ctypes.CDLL, single: int, name: str
) -> None:
    weight = random_ggml(name, OUTPUTS, 768)
    linear = packed(library, single, weight)
    expected = weight.dequantize().numpy()
    for index in (0, 15, 16, OUTPUTS - 1):
        out = np.full(768, SENTINEL)
        library.section_embedding(linear.struct, index, out.ctypes.data)
        assert np.array_equal(out, expected[index]), index
    whole_tiles = packed(library, single, weight.rows(slice(0, 48)))
    assert linear_bytes(whole_tiles.struct) == weight.rows(slice(0, 48)).nbytes


@pytest.mark.parametrize("name", ["Q6_K", "Q4_K"])
def test_columns_of_another_order_meet_their_inputs(
    library: ctypes.CDLL, single: int, name: str
) -> None:
    weight = random_ggml(name, OUTPUTS, 512)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    reordered = GgmlWeight(name, weight.blocks, order)
    assert torch.equal(reordered.dequantize()[:, order.long()], weight.dequantize())
    linear = packed(library, single, reordered)
    x = activations(5, 512)
    moved = np.empty_like(x)
    moved[:, order.numpy()] = x
    plain = forward(library, single, packed(library, single, weight), x)
    assert np.array_equal(forward(library, single, linear, moved), plain)


@pytest.mark.parametrize("name", GGML_TYPES)
def test_instruction_sets_agree_bit_for_bit(loaded: ctypes.CDLL, name: str) -> None:
    if not loaded.ap_isa_supported(Isa.AVX2):
        pytest.skip("no AVX2 here")
    weight, x = random_ggml(name, OUTPUTS, 1024), activations(61, 1024)
    results = []
    for isa in (Isa.AVX2, *(isa for isa in Isa if isa > Isa.AVX2)):
        if not loaded.ap_isa_supported(isa):
            continue
        use_isa(loaded, isa)
        engine = loaded.ap_engine_create(2, 0)
        results.append(forward(loaded, engine, packed(loaded, engine, weight), x).view(np.int32))
        loaded.ap_engine_destroy(engine)
    assert all(np.array_equal(result, results[0]) for result in results)


def test_what_is_no_type_is_refused(library: ctypes.CDLL, single: int) -> None:
    weight = random_ggml("Q4_K", 16, 256)
    blocks = weight.blocks.data_ptr()
    linear = packed(library, single, weight)

    def status(type_number: int, **changes: int) -> int:
        changed = type(linear.struct).from_buffer_copy(linear.struct)
        for name, value in changes.items():
            setattr(changed, name, value)
        code: int = library.ap_linear_pack_ggml(single, changed, type_number, blocks)
        return code

    assert status(12) == Status.OK
    for type_number in (2, 13, 14, 15, 99):  # Q5_K and Q6_K have other codes
        assert status(type_number) == Status.BAD_ARGUMENT, type_number
    for changes in (
        {"in_features": 128},
        {"group": 16},
        {"scale_format": ScaleFormat.Q6_K},
        {"format": Format.INT6},
    ):
        assert status(12, **changes) == Status.BAD_ARGUMENT, changes
    plain = describe(Format.INT4, 16, 256, group=32)
    plain.struct.scale_format = ScaleFormat.Q4_K
    assert library.ap_linear_pack(single, plain.struct, blocks, blocks, None, Format.F16, 32) == (
        Status.BAD_ARGUMENT
    )
