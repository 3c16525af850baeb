"""Keeps the residual stream of all calibration rows in a file per layer reached.

A file is written under another name, flushed and renamed; the previous one stays until the next
begins, so that a layer can be repeated. Files are copied, not mapped: a mapped file would count as
memory, and a full disk would kill the process that writes to it.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from appliance.files import replace_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

FLOAT = torch.float32
_PREFIX = "stream-"


class ResidualStream:
    """The inputs of one layer.

    Args:
        layer: the layer that the stream has reached; its file exists or is `written` next.
    """

    def __init__(
        self, folder: Path, num_rows: int, row_tokens: int, width: int, layer: int = 0
    ) -> None:
        self.layer = layer
        self._folder = folder
        self._shape = num_rows, row_tokens, width

    @property
    def nbytes(self) -> int:
        return math.prod(self._shape) * FLOAT.itemsize

    @property
    def exists(self) -> bool:
        return self._path(self.layer).exists()

    def read(self, rows: slice) -> Tensor:
        """Read some rows, (rows, row_tokens, width) float32."""
        out = torch.empty((rows.stop - rows.start, *self._shape[1:]), dtype=FLOAT)
        row_bytes = self.nbytes // self._shape[0]
        with self._path(self.layer).open("rb", buffering=0) as file:
            file.seek(rows.start * row_bytes)
            read = file.readinto(out.view(-1).view(torch.uint8).numpy().data)
        assert read == out.nbytes, (read, out.nbytes)
        return out

    @contextmanager
    def written(self, layer: int) -> Iterator[StreamWriter]:
        """Write all rows as inputs of `layer`; they become the stream when the block ends.

        Raises:
            OSError: the disk is full, for example; the stream is unchanged.
        """
        for path in self._folder.glob(f"*{_PREFIX}*"):
            if path != self._path(self.layer):
                path.unlink()
        with replace_atomically(self._path(layer)) as temporary:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, self.nbytes)
                yield StreamWriter(descriptor)
            finally:
                os.close(descriptor)
        self.layer = layer

    def _path(self, layer: int) -> Path:
        return self._folder / f"{_PREFIX}{layer:05}"


def stream_bytes(rows: Tensor, width: int) -> int:
    """Return a file's bytes for calibration rows (num_rows, row_tokens)."""
    return rows.numel() * width * FLOAT.itemsize


class StreamWriter:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, rows: Tensor) -> None:
        """Append rows (any, row_tokens, width) float32 on the CPU."""
        write_all(self._descriptor, rows)


def write_all(descriptor: int, tensor: Tensor, offset: int | None = None) -> int:
    """Write a tensor's bytes at the end or an offset; return their number. Raises OSError."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
    written = 0
    while written < len(data):
        if offset is None:
            written += os.write(descriptor, data[written:])
        else:
            written += os.pwrite(descriptor, data[written:], offset + written)
    return written
