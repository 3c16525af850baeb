"""Writes a GGUF file whose tensor types are known in advance, its tensors in any order."""

from __future__ import annotations

import math
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from appliance.errors import QuantizeError
from appliance.quant.run.shard_writer import PlacedTensors
from appliance.quant.walk.pieces import all_finite
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import Tensor

    from appliance.quant.gguf.tensors import FileSettings, FileTensor
    from appliance.quant.run.shard_writer import TensorLayout

ALIGNMENT = 32  # bytes, the format's default
QUANTIZATION_VERSION = 2  # of the layouts of blocks
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in PLAIN_TYPES.items()}


@dataclass(frozen=True, slots=True)
class TypedTensor:
    """A tensor of the file, its type, and its bytes as they are written.

    Attributes:
        layout: under the checkpoint's name; (out_features, bytes of a row) uint8 of blocks.
    """

    tensor: FileTensor
    type_name: str
    layout: TensorLayout

    @classmethod
    def plain(cls, tensor: FileTensor, layout: TensorLayout) -> TypedTensor:
        """Return a tensor that is not quantized."""
        return cls(tensor, _NAMES[layout.dtype], layout)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file before its weights.

    Attributes:
        head: everything before the tensors.
        starts: offsets of tensors, by the checkpoint's names.
        extra: bytes of the tensors that are settings, or kept as they are, and their offsets.
    """

    tensors: tuple[TypedTensor, ...]
    head: bytes
    starts: dict[str, int]
    extra: tuple[tuple[int, memoryview], ...]
    nbytes: int

    @classmethod
    def of(cls, settings: FileSettings, tensors: Iterable[TypedTensor]) -> PlannedFile:
        tensors = tuple(tensors)
        head = _head(settings, tensors)
        end = _aligned(len(head))
        starts: dict[str, int] = {}
        for planned in tensors:
            starts[planned.layout.name] = end
            end = _aligned(end + planned.layout.nbytes)
        extra = []
        for values in settings.extra.values():
            extra.append((end, memoryview(values.astype("<f4").tobytes())))
            end = _aligned(end + values.nbytes)
        for kept in settings.heads.values():
            extra.append((end, kept.data.data))
            end = _aligned(end + kept.data.nbytes)
        return cls(tensors, head, starts, tuple(extra), end)

    def write_without_weights(self, path: Path) -> None:
        """Write a file of the whole size with a hole for the weights, which takes no disk."""
        with path.open("wb") as file:
            file.write(self.head)
            for start, content in self.extra:
                file.seek(start)
                file.write(content)
            file.truncate(self.nbytes)


class GGUFFileWriter(PlacedTensors):
    """Writes the tensors of a planned file, which get the file's order of rows.

    Args:
        done: tensors, by the checkpoint's names, that an earlier writer wrote and flushed.

    Raises:
        OSError: the disk has no space for the file.
    """

    def __init__(self, path: Path, planned: PlannedFile, done: Collection[str] = ()) -> None:
        super().__init__([one.layout for one in planned.tensors], done)
        self._tensors = {one.layout.name: one.tensor for one in planned.tensors}
        try:
            self._reserve(path, planned.head, planned.starts, planned.nbytes)
            for start, content in planned.extra:
                assert os.pwrite(self._files[0], content, start) == len(content), path
        except BaseException:
            self._close()
            raise

    def write(self, name: str, pieces: Iterable[Tensor]) -> int:
        """Write one tensor, as `PlacedTensors.write`.

        Raises:
            QuantizeError: a number is beyond its type.
        """
        tensor = self._tensors[name]
        if tensor.order is None and not tensor.shift:
            return super().write(name, (_finite(name, piece) for piece in pieces))
        whole = torch.cat(list(pieces))
        if tensor.order is not None:
            whole = whole[torch.from_numpy(tensor.order)]
        return super().write(name, [_finite(name, whole + tensor.shift if tensor.shift else whole)])


def _finite(name: str, piece: Tensor) -> Tensor:
    if piece.is_floating_point() and not all_finite(piece):
        raise QuantizeError(
            f"{name} has numbers beyond float16; use --format compressed-tensors, which keeps"
            " bfloat16"
        )
    return piece


def _head(settings: FileSettings, tensors: tuple[TypedTensor, ...]) -> bytes:
    """Let the `gguf` package write everything before the tensors."""
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        path = Path(folder) / "head"
        writer = GGUFWriter(path, settings.architecture)
        for one in settings.settings:
            writer.add_key_value(one.key, one.value, one.kind, sub_type=one.inner)
        writer.add_quantization_version(QUANTIZATION_VERSION)
        for planned in tensors:
            _announce(writer, planned.tensor.name, planned.tensor.slot.shape, planned.type_name)
        for name, values in settings.extra.items():
            _announce(writer, name, tuple(values.shape), "F32")
        for name, kept in settings.heads.items():
            _announce(writer, name, kept.shape, kept.kind)
        writer.write_header_to_file()
        try:
            writer.write_kv_data_to_file()
        except (ValueError, struct.error) as error:  # a number or text beyond what a key may hold
            writer.close()
            raise QuantizeError(
                f"a setting cannot be written to a GGUF file: {error}; use --format"
                " compressed-tensors"
            ) from error
        writer.write_ti_data_to_file()
        writer.close()
        return path.read_bytes()


def _announce(writer: GGUFWriter, name: str, shape: tuple[int, ...], kind: str) -> None:
    number = GGMLQuantizationType[kind]
    size, nbytes = GGML_QUANT_SIZES[number]
    stored = (*shape[:-1], shape[-1] // size * nbytes)
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=number)


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT
