"""Writing keys and values into pages, bit for bit where the torch kernel defines the bits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.kernels.cpu_pages import (
    FORMATS,
    SEALED,
    Cache,
    Shape,
    codes_of,
    decode,
    rotate,
)

from appliance.kernels.cpu.structs import Format
from appliance.kernels.kv_page.codes import quantize_fp8, quantize_int4
from appliance.kernels.kv_write.reference import quantize_int8


def edge_rows(dim: int) -> NDArray[np.float32]:
    """Tokens (n, 1, dim) with the edge cases of rounding and scales."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((40, dim), np.float32)
    rows[0] = 0
    rows[1] = 1.5
    rows[2] = -2e-7  # its scale is a subnormal float16
    rows[3] *= 1e-12  # too small for any scale
    rows[4] = 3e4 * np.sign(rows[4])
    rows[5] = np.arange(dim) - dim / 2 + 0.5  # ties
    rows[6, 0] = 1000
    rows[7] = np.abs(rows[7]) + 100
    # magnitudes whose 127th part lies halfway between two float16, to the last bit
    middle = np.float32(127 * (1 + (2 * np.arange(300) + 1) * 2.0**-11))
    halfway = random.uniform(-100, 100, (3, 300, dim)).astype(np.float32)
    halfway[:, :, 5] = np.nextafter(middle, [[0], [128], [1000]], dtype=np.float32)
    halfway[1, :, 5] = middle
    return np.concatenate([rows, halfway.reshape(-1, dim)])[:, None]


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_int8_codes_and_scales_are_those_of_the_torch_kernel(
    library: ctypes.CDLL, engine: int, dim: int
) -> None:
    key = edge_rows(dim)
    value = key[::-1] * 0.37
    num_blocks = len(key) // 32 + 2
    cache = Cache(library, Shape(1, 1, dim, block_size=32), Format.INT8, num_blocks)
    slots = np.random.default_rng(1).permutation(32 * num_blocks)[: len(key)]
    cache.write(engine, key, value, slots.tolist())
    pages = np.concatenate([cache.pages(block)[0] for block in range(num_blocks)])
    *codes, scales = codes_of(Format.INT8, dim, pages)
    for number, written in enumerate((key, value)):
        expected, scale = quantize_int8(torch.from_numpy(np.ascontiguousarray(written[:, 0])))
        got = codes[number].reshape(-1, dim)[slots]
        np.testing.assert_array_equal(got, expected.numpy())
        np.testing.assert_array_equal(scales[:, number].ravel()[slots], scale.numpy())


@pytest.mark.parametrize(
    ("format", "dtype"), [(Format.F32, torch.float32), (Format.F16, torch.float16),
                          (Format.BF16, torch.bfloat16)]
)  # fmt: skip
def test_float_elements_are_rounded_as_torch_does(
    library: ctypes.CDLL, engine: int, format: Format, dtype: torch.dtype
) -> None:
    key = edge_rows(48)[:48]
    cache = Cache(library, Shape(1, 1, 48), format, 3)
    slots = list(range(len(key)))
    cache.write(engine, key, -key, slots)
    keys, values = cache.read([0, 1, 2], len(key))
    expected = torch.from_numpy(key[:, 0]).to(dtype).double().numpy()
    np.testing.assert_array_equal(keys[0], expected)
    np.testing.assert_array_equal(values[0], -expected)


@pytest.mark.parametrize("dim", [16, 80, 96, 256])
def test_int4_is_within_half_a_step(library: ctypes.CDLL, engine: int, dim: int) -> None:
    cache = Cache(library, Shape(1, 1, dim), Format.INT4, 3)
    rows = edge_rows(dim)[:48]
    cache.write(engine, rows, rows, list(range(len(rows))))
    pages = np.concatenate([cache.pages(block)[0] for block in range(3)])
    read = [x.reshape(48, dim)[: len(rows)] for x in decode(Format.INT4, dim, pages)]
    *codes, scales = codes_of(Format.INT4, dim, pages)
    for number, (x, got) in enumerate(zip((rotate(rows[:, 0]), rows[:, 0]), read, strict=True)):
        got = rotate(got) if number == 0 else got
        span = x.max(axis=-1) - x.min(axis=-1)
        highest = np.abs(x).max(axis=-1)
        step = np.maximum(span / 15, highest / 2048)
        # float16 rounds the scale, which counts up to 15 times, and the offset, by at most half a
        # code
        limit = step * (0.5 + 15 * 2.0**-11 + 0.5) + 1e-6
        assert (np.abs(got - x).max(axis=-1) <= limit).all()
        stored = scales[:, 2 * number].ravel()[: len(rows)]
        np.testing.assert_allclose(stored, step, rtol=1e-3, atol=6e-8)
        spread = codes[number].reshape(48, dim)[8 : len(rows)]
        assert (spread.min(axis=-1) == 0).all()
        assert (spread.max(axis=-1) == 15).all()


def test_fp8_codes_are_those_of_the_torch_kernel(library: ctypes.CDLL, engine: int) -> None:
    cache = Cache(library, Shape(1, 1, 80), Format.FP8, 3)
    rows = edge_rows(80)[:48]
    rows[7] = np.geomspace(1e-6, 1e6, 80)
    rows[8] = np.arange(80) * 2.0**-10 * cache.head_scales[0]  # steps and ties of subnormals
    cache.write(engine, rows, rows, list(range(48)))
    pages = np.concatenate([cache.pages(block)[0] for block in range(3)])
    keys = pages[:, : 16 * 80].reshape(3, 80, 16).transpose(0, 2, 1).reshape(48, 80)
    values = pages[:, 16 * 80 :].reshape(48, 80)
    x = torch.from_numpy(np.ascontiguousarray(rows[:, 0]))
    for codes, scale in zip((keys, values), cache.head_scales, strict=True):
        # The library multiplies by the inverse, as is usual for a constant.
        inverse = torch.tensor(np.float32(1) / scale)
        expected = quantize_fp8(x * inverse, torch.tensor(1.0)).numpy()
        zero = (expected & 127) == 0
        np.testing.assert_array_equal(codes[~zero], expected[~zero])
        assert ((codes[zero] & 127) == 0).all()


def test_fp8_elements_that_are_not_finite_are_nan(library: ctypes.CDLL, engine: int) -> None:
    cache = Cache(library, Shape(1, 1, 16), Format.FP8, 1)
    row = np.zeros((1, 1, 16), np.float32)
    row[0, 0, :3] = np.inf, -np.inf, np.nan
    cache.write(engine, row, row, [0])
    for x in cache.read([0], 1):
        np.testing.assert_array_equal(np.isnan(x[0, 0]), np.arange(16) < 3)


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_sealed_keys_are_those_of_the_torch_kernel(
    library: ctypes.CDLL, engine: int, dim: int
) -> None:
    cache = Cache(library, Shape(2, 2, dim), Format.SEALED, 2)
    random = np.random.default_rng(4)
    key, value = random.standard_normal((2, 64, 2, dim), np.float32)
    key[:, :, 3] *= 50
    key[:, 0, 5] = 7.0  # a constant channel
    cache.write(engine, key, value, list(range(64)))
    opened, _ = cache.read([0, 1], 64, opened=True)
    sealed, values = cache.read([0, 1], 64)
    channels = torch.from_numpy(opened).float().unflatten(1, (2, 32)).transpose(2, 3)
    codes, scales, offsets = quantize_int4(channels)
    expected = (codes.double() - 8) * scales.double()[..., None] + offsets.double()[..., None]
    np.testing.assert_array_equal(sealed, expected.transpose(2, 3).flatten(1, 2).numpy())
    step = (value.max(axis=-1) - value.min(axis=-1)).T[..., None] / 15
    assert (np.abs(values - value.transpose(1, 0, 2)) <= 0.6 * step + 0.05).all()


def test_k8v4_keeps_the_keys_of_the_open_block(library: ctypes.CDLL, engine: int) -> None:
    cache = Cache(library, Shape(2, 2, 48), Format.K8V4, 2)
    key, value = np.random.default_rng(4).standard_normal((2, 64, 2, 48), np.float32)
    cache.write(engine, key, value, list(range(64)))
    opened, sealed = cache.read([0, 1], 64, opened=True), cache.read([0, 1], 64)
    np.testing.assert_array_equal(sealed[0], opened[0])
    assert 0 < np.abs(sealed[1] - opened[1]).max() < 0.3


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_mean_is_taken_off_the_keys(library: ctypes.CDLL, engine: int, format: Format) -> None:
    key, value = np.random.default_rng(4).standard_normal((2, 32, 2, 48), np.float32)
    mean = np.arange(96, dtype=np.float32).reshape(2, 48)
    centred = Cache(library, Shape(2, 2, 48), format, 2, key_mean=mean)
    plain = Cache(library, Shape(2, 2, 48), format, 2)
    centred.write(engine, key + mean, value, list(range(32)))
    plain.write(engine, (key + mean) - mean, value, list(range(32)))
    np.testing.assert_array_equal(centred.arena, plain.arena)
    np.testing.assert_array_equal(centred.open, plain.open)


def test_a_write_leaves_all_other_slots_alone(library: ctypes.CDLL, engine: int) -> None:
    for format in set(FORMATS) - {*SEALED, Format.FP8}:
        cache = Cache(library, Shape(2, 2, 80, block_size=32), format, 3)
        before = cache.arena.copy()
        key = np.ones((1, 2, 80), np.float32)
        slot = 32 + 21  # block 1, page 1, token 5
        cache.write(engine, key, 2 * key, [slot])
        changed = cache.pages(1).copy()
        keys, values = decode(format, 80, changed[:, 1])
        np.testing.assert_allclose(values[:, 5], 2, rtol=1e-2)
        np.testing.assert_allclose(keys[:, 5], 1, rtol=1e-2)
        kept = np.delete(np.stack([keys, values]), 5, axis=2)
        assert np.isnan(kept).all()
        cache.pages(1)[:, 1] = before[0]
        np.testing.assert_array_equal(cache.arena, before)


@pytest.mark.parametrize("format", FORMATS)
def test_page_bytes(library: ctypes.CDLL, format: Format) -> None:
    sizes = {Format.F32: 4, Format.F16: 2, Format.BF16: 2, Format.K8V4: 0.75}
    integer = {Format.INT8: 1, Format.INT4: 0.5, Format.SEALED: 0.5, Format.FP8: 1}
    scales = {Format.INT8: 64, Format.INT4: 128, Format.SEALED: 64, Format.K8V4: 128}
    for dim in (32, 64, 128, 256, 512):
        expected = 2 * 16 * dim * (sizes | integer)[format] + scales.get(format, 0)
        if format is Format.SEALED:
            expected += 2 * dim
        assert library.ap_page_bytes(format, dim) == expected
    for dim in (0, -16, 8, 24, 528):
        assert library.ap_page_bytes(format, dim) == -1
    assert library.ap_page_bytes(len(Format), 64) == -1
    assert library.ap_page_bytes(-1, 64) == -1
