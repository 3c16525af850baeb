"""Reads tensor data of GGUF files into arrays and the packed form.

A matrix is read and converted some rows at a time, so that only a piece of it is in memory beside
the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import read_into
from appliance.gguf.conversion import LOSSLESS, interleave
from appliance.gguf.grids import unpacked
from appliance.gguf.types import DENSE_TYPES, FLOAT_BITS, SUPERBLOCK, UNPACKED_TYPES
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from torch import Tensor

    from appliance.gguf.header import TensorInfo

# Elements that one thread reads at a time: 160 KB of a 4-bit type, so that the pieces of one matrix
# of a small model keep all cores busy.
READ_AT_ONCE = 1 << 18
# Elements of the types that are unpacked at a time: what is made of them stays in a core's cache.
CONVERTED_AT_ONCE = 1 << 15


def read_tensor(
    info: TensorInfo, workers: Executor
) -> Tensor | PackedWeight | Fp4Weight | GgmlWeight:
    """Read one tensor of its file; `workers` convert its rows."""
    name = info.type.name
    if name in DENSE_TYPES:
        raw = np.empty(info.nbytes, dtype=np.uint8)
        read_into(info.file.path, info.file.identity, info.offset, raw.data)
        values: Tensor = arrays.of_numpy(raw).view(DENSE_TYPES[name]).reshape(info.shape)
        return values
    if len(info.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {info.name!r} of {info.file.path} has type {name} and shape {info.shape}; "
            "only matrices are quantized in the files that are read here"
        )
    if name in FLOAT_BITS:
        codes = _FLOATS[name](_rows(info, 0, info.shape[0]))
        _check_scales(info, finite=codes.is_finite())
        return codes
    if name in LOSSLESS:
        whole = _read_packed(info, workers)
        finite = arrays.is_finite(whole.scale) and arrays.is_finite(whole.offset)
        _check_scales(info, finite=finite)
        return whole
    weight = _read_unpacked(info, workers) if name in UNPACKED_TYPES else _read_held(info)
    _check_scales(info, finite=weight.is_finite())
    return weight


def _read_held(info: TensorInfo) -> GgmlWeight:
    return GgmlWeight(info.type.name, _rows(info, 0, info.shape[0]))


def _read_unpacked(info: TensorInfo, workers: Executor) -> GgmlWeight:
    """Read blocks and give each weight a code, as many rows at a time as a core's cache holds."""
    num_rows, width = info.shape
    held_bytes = UNPACKED_TYPES[info.type.name]
    whole = np.empty((num_rows, width // SUPERBLOCK, held_bytes), dtype=np.uint8)
    starts = range(0, num_rows, max(1, CONVERTED_AT_ONCE // width))

    def unpack_rows(start: int) -> None:
        rows = whole[start : start + starts.step]
        blocks = _rows(info, start, len(rows)).numpy().reshape(-1, info.type.block_bytes)
        rows[:] = unpacked(info.type.name, blocks).reshape(rows.shape)

    for _ in workers.map(unpack_rows, starts):
        pass
    held = "Q2_K" if info.type.name.startswith("TQ") else info.type.name
    return GgmlWeight(held, arrays.of_numpy(whole))


def _read_packed(info: TensorInfo, workers: Executor) -> PackedWeight:
    num_rows, width = info.shape
    starts = range(0, num_rows, max(1, READ_AT_ONCE // width))
    convert = LOSSLESS[info.type.name]
    with _unchecked():
        whole = _room_for(num_rows, convert(_rows(info, 0, 1)))

    def convert_rows(start: int) -> None:
        with _unchecked():
            piece = convert(_rows(info, start, min(starts.step, num_rows - start)))
        _put(whole, start, piece)

    for _ in workers.map(convert_rows, starts) if len(starts) > 1 else map(convert_rows, starts):
        pass
    return whole


def _unchecked() -> np.errstate:
    """Let NumPy compute with whatever scales a file has: `_check_scales` looks at the result."""
    return np.errstate(all="ignore")


def _check_scales(info: TensorInfo, *, finite: bool) -> None:
    if not finite:
        raise CheckpointError(
            f"tensor {info.name!r} of {info.file.path} has infinite or undefined scales; "
            "download the file again"
        )


def _mxfp4(blocks: Tensor) -> Fp4Weight:
    """Convert blocks (out, groups, 17): a scale e8m0, then 32 codes; nothing is computed."""
    scale = arrays.viewed(blocks[..., 0].contiguous(), "float8_e8m0fnu")
    ones = arrays.like(blocks, np.ones(len(blocks), dtype=np.float32))
    return Fp4Weight(interleave(blocks[..., 1:]), scale, ones)


def _nvfp4(blocks: Tensor) -> Fp4Weight:
    """Convert blocks (out, blocks, 36): four scales e4m3, then 16 codes for each."""
    scale = arrays.viewed(blocks[..., :4].contiguous().flatten(1), "float8_e4m3fn")
    ones = arrays.like(blocks, np.ones(len(blocks), dtype=np.float32))
    codes = blocks[..., 4:].contiguous().view(len(blocks), -1, 8)
    return Fp4Weight(interleave(codes), scale, ones)


_FLOATS = {"MXFP4": _mxfp4, "NVFP4": _nvfp4}


def _rows(info: TensorInfo, start: int, count: int) -> Tensor:
    """Read rows of a matrix: (count, blocks, bytes per block) uint8."""
    row_bytes = info.nbytes // info.shape[0]
    raw = np.empty(count * row_bytes, dtype=np.uint8)
    read_into(info.file.path, info.file.identity, info.offset + start * row_bytes, raw.data)
    blocks: Tensor = arrays.of_numpy(raw.reshape(count, -1, info.type.block_bytes))
    return blocks


def _put(whole: PackedWeight, start: int, piece: PackedWeight) -> None:
    """Copy rows to their place."""
    rows = slice(start, start + piece.shape[0])
    for name in ("codes", "scale", "offset"):
        getattr(whole, name).numpy()[rows] = getattr(piece, name).numpy()


def _room_for(num_rows: int, piece: PackedWeight) -> PackedWeight:
    def more(part: Tensor) -> Tensor:
        return arrays.empty((num_rows, *part.shape[1:]), part.dtype, part)  # type: ignore[no-any-return]

    return PackedWeight(
        codes=more(piece.codes),
        scale=more(piece.scale),
        offset=more(piece.offset),
        offset_kind=piece.offset_kind,
        bits=piece.bits,
        group_size=piece.group_size,
    )
