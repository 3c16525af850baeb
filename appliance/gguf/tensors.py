"""Reads tensor data of GGUF files into arrays and the packed form.

A matrix is read and converted some rows at a time, so that only a piece of it is in memory beside
the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import read_into
from appliance.gguf.conversion import LOSSLESS, Loss, exact_values, interleave, requantize
from appliance.gguf.types import DENSE_TYPES, FLOAT_BITS
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.packed import PackedWeight

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from torch import Tensor

    from appliance.gguf.header import TensorInfo

# Elements that one thread reads at a time: 160 KB of a 4-bit type, so that the pieces of one matrix
# of a small model keep all cores busy.
READ_AT_ONCE = 1 << 18
# Elements of the types that are converted at a time: their float32 values stay in a core's cache.
CONVERTED_AT_ONCE = 1 << 15


def read_tensor(
    info: TensorInfo, workers: Executor
) -> tuple[Tensor | PackedWeight | Fp4Weight | GgmlWeight, Loss | None]:
    """Read one tensor of its file; `workers` convert its rows.

    Returns:
        The tensor and, if it was not kept exactly, the loss in its first rows.
    """
    name = info.type.name
    if name in DENSE_TYPES:
        raw = np.empty(info.nbytes, dtype=np.uint8)
        read_into(info.file.path, info.file.identity, info.offset, raw.data)
        values: Tensor = arrays.of_numpy(raw).view(DENSE_TYPES[name]).reshape(info.shape)
        return values, None
    if len(info.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {info.name!r} of {info.file.path} has type {name} and shape {info.shape}; "
            "only matrices are quantized in the files that are read here"
        )
    if name in GGML_TYPES:
        weight = GgmlWeight(name, _rows(info, 0, info.shape[0]))
        _check_scales(info, finite=weight.is_finite())
        return weight, None
    if name in FLOAT_BITS:
        codes = _FLOATS[name](_rows(info, 0, info.shape[0]))
        _check_scales(info, finite=codes.is_finite())
        return codes, None
    whole, loss = _read_packed(info, workers)
    finite = arrays.is_finite(whole.scale) and arrays.is_finite(whole.offset)
    _check_scales(info, finite=finite)
    return whole, loss


def _read_packed(info: TensorInfo, workers: Executor) -> tuple[PackedWeight, Loss | None]:
    num_rows, width = info.shape
    starts = range(0, num_rows, max(1, READ_AT_ONCE // width))
    lossless = info.type.name in LOSSLESS
    step = starts.step if lossless else max(1, CONVERTED_AT_ONCE // width)
    with _unchecked():
        whole = _room_for(num_rows, _converted(info, _rows(info, 0, 1))[0])

    def convert_rows(start: int) -> Loss | None:
        """Read some rows and convert a few of them at a time; return the loss of the first ones."""
        blocks = _rows(info, start, min(starts.step, num_rows - start))
        lost = None if lossless or start else Loss()
        with _unchecked():
            for at in range(0, len(blocks), step):
                piece, exact = _converted(info, blocks[at : at + step])
                _put(whole, start + at, piece)
                if lost is not None and exact is not None:
                    lost += Loss.between(exact, piece.dequantize())
        return lost

    loss, *_ = workers.map(convert_rows, starts) if len(starts) > 1 else map(convert_rows, starts)
    return whole, loss


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


def _converted(info: TensorInfo, blocks: Tensor) -> tuple[PackedWeight, Tensor | None]:
    """Convert rows to packed form; return their exact weights, too, where that loses something."""
    if info.type.name in LOSSLESS:
        return LOSSLESS[info.type.name](blocks), None
    exact = exact_values(info.type.name, blocks)
    return requantize(exact), exact


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
