"""Writes files whose tensor sizes are known in advance, safetensors among them.

Each tensor has a fixed place, so tensors may come in any order, one at a time; disk space is
reserved before any work. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.files import flush
from appliance.model_files.checkpoint import INDEX_NAME, WEIGHTS_NAME
from appliance.quant.walk.stream import write_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from torch import Tensor

_HEADER_ALIGNMENT = 8  # the safetensors format aligns every tensor
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
    # Of copied tensors.
    torch.float64: "F64",
    torch.float8_e5m2: "F8_E5M2",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class PlacedTensors:
    """Writes tensors to places in files that are reserved first, and closes these.

    Args:
        layouts: all tensors.
        done: tensors that an earlier writer with the same arguments wrote and flushed.
    """

    def __init__(self, layouts: Sequence[TensorLayout], done: Collection[str]) -> None:
        self._waiting = {layout.name: layout for layout in layouts if layout.name not in done}
        self._places: dict[str, tuple[int, int]] = {}  # descriptor and offset
        self._files: list[int] = []
        self._unflushed: set[int] = set()
        self._folders: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()
        assert error is not None or not self._waiting, f"not written: {sorted(self._waiting)}"

    def write(self, name: str, pieces: Iterable[Tensor]) -> int:
        """Write one tensor.

        Args:
            name: in the layouts, and not written yet.
            pieces: the tensor, or its consecutive parts along the first dimension.

        Returns:
            Bytes written.
        """
        layout = self._waiting.pop(name)
        file, offset = self._places[name]
        self._unflushed.add(file)
        written = 0
        for piece in pieces:
            assert piece.dtype == layout.dtype, (name, piece.dtype, layout.dtype)
            assert piece.shape[1:] == layout.shape[1:], (name, piece.shape, layout.shape)
            written += write_all(file, piece, offset + written)
        assert written == layout.nbytes, (name, written, layout)
        return written

    def flush(self) -> None:
        for file in self._unflushed:
            os.fsync(file)
        self._unflushed.clear()
        for folder in self._folders:
            flush(folder)

    def _reserve(self, path: Path, prefix: bytes, starts: Mapping[str, int], size: int) -> None:
        """Reserve a file of `size` bytes, write its first ones and place tensors in it.

        Raises:
            OSError: the disk has no space for it.
        """
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._files.append(file)
        self._folders.add(path.parent)
        os.posix_fallocate(file, 0, size)
        assert os.pwrite(file, prefix, 0) == len(prefix), path
        self._unflushed.add(file)
        self._places |= {name: (file, start) for name, start in starts.items()}

    def _close(self) -> None:
        for file in self._files:
            os.close(file)


class ShardWriter(PlacedTensors):
    """Writes one or more safetensors files into a folder.

    Args:
        folder: gets the files and, if there are several, their index.
        max_shard_bytes: size at which a new file begins; a larger tensor gets its own file.
        done: tensors that an earlier writer with the same arguments wrote and flushed.

    Raises:
        OSError: the disk has no space for all files.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Sequence[TensorLayout],
        max_shard_bytes: int,
        done: Collection[str] = (),
    ) -> None:
        super().__init__(layouts, done)
        shards = split_into_shards(layouts, max_shard_bytes)
        self.total_bytes = sum(layout.nbytes for layout in layouts)
        self.folder = folder
        file_names = (
            [WEIGHTS_NAME]
            if len(shards) == 1
            else [
                f"model-{index:05}-of-{len(shards):05}.safetensors"
                for index in range(1, len(shards) + 1)
            ]
        )
        try:
            for file_name, shard in zip(file_names, shards, strict=True):
                self._start_file(folder / file_name, shard)
            if len(shards) > 1:
                self._write_index(dict(zip(file_names, shards, strict=True)))
        except BaseException:
            self._close()
            raise

    def _start_file(self, path: Path, shard: Sequence[TensorLayout]) -> None:
        # Widest types first: tensors must be aligned, and the format allows no gaps.
        ordered = sorted(shard, key=lambda layout: (-layout.dtype.itemsize, layout.name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        starts: dict[str, int] = {}
        for layout in ordered:
            starts[layout.name], end = end, end + layout.nbytes
            header[layout.name] = {
                "dtype": _DTYPE_NAMES[layout.dtype],
                "shape": list(layout.shape),
                "data_offsets": [starts[layout.name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        prefix = struct.pack("<Q", len(text)) + text
        places = {name: len(prefix) + start for name, start in starts.items()}
        self._reserve(path, prefix, places, len(prefix) + end)

    def _write_index(self, shards: dict[str, list[TensorLayout]]) -> None:
        weight_map = {layout.name: name for name, shard in shards.items() for layout in shard}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def split_into_shards(
    layouts: Sequence[TensorLayout], max_shard_bytes: int
) -> list[list[TensorLayout]]:
    """Split tensors, in order, into runs of at most `max_shard_bytes`."""
    shards: list[list[TensorLayout]] = []
    room = 0
    for layout in layouts:
        if not shards or layout.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(layout)
        room -= layout.nbytes
    return shards
