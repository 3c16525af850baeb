"""Tensor data of GGUF files: into torch tensors and the packed weight form.

A matrix is read and converted some rows at a time, so that beside the result there is never more
than a piece of it in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import FileIdentity, read_into
from appliance.gguf.converted import Loss, convert
from appliance.gguf.lossless import LOSSLESS
from appliance.gguf.types import DENSE_TYPES
from appliance.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from appliance.gguf.header import TensorInfo

PIECE_ELEMENTS = 1 << 20  # converted at once; each takes about 20 bytes for a moment


def read_tensor(
    path: Path, identity: FileIdentity, info: TensorInfo
) -> tuple[Tensor | PackedWeight, Loss | None]:
    """Read one tensor of the file that `identity` describes.

    Returns:
        The tensor and, if it was not kept exactly, what that did to its first piece.
    """
    if info.type.name in DENSE_TYPES:
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        read_into(path, identity, info.offset, raw.numpy().data)
        return raw.view(getattr(torch, DENSE_TYPES[info.type.name])).view(info.shape), None
    if len(info.shape) != 2:
        raise UnsupportedModelError(
            f"tensor {info.name!r} of {path} has type {info.type.name} and shape {info.shape}; "
            "only matrices are quantized in the files that are read here"
        )
    whole: PackedWeight | None = None
    loss: Loss | None = None
    for start, blocks in _pieces(path, identity, info):
        if info.type.name in LOSSLESS:
            piece = LOSSLESS[info.type.name](blocks)
        else:
            try:
                piece, exact = convert(info.type.name, blocks)
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"tensor {info.name!r} of {path} has type {info.type.name}, which cannot be "
                    "dequantized here; use a file quantized as Q4_0, Q4_1, Q4_K, Q5_K, Q6_K or Q8_0"
                ) from error
            if loss is None:
                loss = Loss.between(exact(), piece.dequantize())
        if whole is None:
            whole = _room_for(info.shape[0], piece)
        for part in ("codes", "scale", "offset"):
            getattr(whole, part)[start : start + len(blocks)] = getattr(piece, part)
    assert whole is not None
    if not (whole.scale.isfinite().all() and whole.offset.isfinite().all()):
        raise CheckpointError(
            f"tensor {info.name!r} of {path} has infinite or undefined scales; "
            "download the file again"
        )
    return whole, loss


def _pieces(path: Path, identity: FileIdentity, info: TensorInfo) -> Iterator[tuple[int, Tensor]]:
    """First rows and (rows, blocks, bytes of a block) uint8, which the next piece overwrites."""
    num_rows, width = info.shape
    at_once = max(1, PIECE_ELEMENTS // width)
    row_bytes = info.nbytes // num_rows
    raw = torch.empty(min(at_once, num_rows) * row_bytes, dtype=torch.uint8)
    for start in range(0, num_rows, at_once):
        rows = min(at_once, num_rows - start)
        piece = raw[: rows * row_bytes]
        read_into(path, identity, info.offset + start * row_bytes, piece.numpy().data)
        yield start, piece.view(rows, -1, info.type.block_bytes)


def _room_for(num_rows: int, piece: PackedWeight) -> PackedWeight:
    """An empty weight of the kind of a piece."""

    def more(part: Tensor) -> Tensor:
        return part.new_empty(num_rows, *part.shape[1:])

    return PackedWeight(
        codes=more(piece.codes),
        scale=more(piece.scale),
        offset=more(piece.offset),
        offset_kind=piece.offset_kind,
        bits=piece.bits,
        group_size=piece.group_size,
    )
