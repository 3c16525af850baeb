"""Linears of the CPU library to test: packed from random codes, with the expected results."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from appliance.kernels.cpu.structs import Format, LinearStruct, Offset, Status
from appliance.kernels.weights.packed import OffsetKind, PackedWeight

Array = NDArray[Any]

ROW_COUNTS = (*range(1, 14), 16, 40, 130, 250)  # every kernel; the last one is the longest
WIDTHS = {32: (32, 96, 576), 64: (64, 192, 576), 128: (128, 1152)}
OUTPUTS = 50  # three tiles and two more outputs
GUARD = 64  # elements after an array that nothing may touch
SENTINEL = np.float32(12345.0)

INTEGER = (Format.INT4, Format.INT8)
NARROW = {Format.INT2: 2, Format.INT3: 3}  # whose codes stand in 4 bits before they are packed
DENSE = (Format.F32, Format.F16, Format.BF16)
DTYPES = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}


def aligned(nbytes: int) -> Array:
    """Bytes that begin at a multiple of 64, all 0xff: NaN in every float format."""
    whole = np.full(nbytes + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]


@dataclass
class Linear:
    """An ap_linear and the arrays that it points to."""

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
    """An ap_linear over memory for the packed weight."""
    padded = -(-out_features // 16) * 16
    known = {Format.INT4: 4, Format.E2M1: 4, Format.INT8: 8, Format.F32: 32, **NARROW}
    bits = known.get(fmt, 16)
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
    """Random codes of every value; scales of either sign, and zero points of few bits whole."""
    random = torch.Generator().manual_seed(out_features * in_features + group)
    bits = 8 if fmt == Format.INT8 else 4
    own = NARROW.get(fmt, bits)
    q = torch.randint(0, 1 << own, (out_features, in_features), generator=random, dtype=torch.uint8)
    codes = q[:, 0::2] | (q[:, 1::2] << 4) if bits == 4 else q
    shape = (out_features, in_features // group)
    scale = 0.02 * torch.randn(shape, generator=random) + 0.01
    if kind == Offset.ADDITIVE:
        offset = 0.1 * torch.randn(shape, generator=random)
    elif kind == Offset.ZERO_POINT:
        offset = (1 << own) * torch.rand(shape, generator=random)
        offset = offset.round() if own < bits else offset
    else:
        offset = torch.full(shape, 1 << (own - 1))
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
    """x (rows, in_features) -> (rows, out_features); checks that nothing else is written."""
    x = np.ascontiguousarray(x, np.float32)
    count = x.shape[0] * linear.struct.out_features
    out = np.full(count + GUARD, SENTINEL)
    status = library.section_linear(
        engine, linear.struct, x.ctypes.data, x.shape[0], False, out.ctypes.data
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
    """Products of quantized rows by exact integer sums and float64, and the sum of magnitudes."""
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
