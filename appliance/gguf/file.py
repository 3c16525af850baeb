"""A GGUF file: its metadata, and its tensors read one at a time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from appliance.gguf.header import read_header

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from appliance.gguf.types import TensorType
    from appliance.kernels.weights.fp4 import Fp4Weight
    from appliance.kernels.weights.ggml import GgmlWeight
    from appliance.kernels.weights.packed import PackedWeight


class GGUFFile:
    """A checked GGUF model, in one file or several.

    Args:
        path: the file, or any part of a split model; files are opened for each read and never stay
            mapped.
        in_torch: tensors are read as torch's; otherwise they are `HostArray`.
        vocabulary: keep the tokenizer's arrays in `metadata`.

    Raises:
        CheckpointError: the file is empty, cut, inconsistent or no GGUF file.
        UnsupportedModelError: a tensor type that is not read.
    """

    def __init__(self, path: Path, *, in_torch: bool = True, vocabulary: bool = True) -> None:
        self._in_torch = in_torch
        self._header = read_header(path, vocabulary=vocabulary)
        self.path = self._header.files[0].path
        self._workers: ThreadPoolExecutor | None = None  # its threads end with this file

    @property
    def metadata(self) -> dict[str, Any]:
        """Values by key; arrays are lists."""
        return self._header.metadata

    def with_metadata(self, metadata: Mapping[str, Any]) -> GGUFFile:
        """Return the same tensors under other metadata."""
        other = copy(self)
        other._header = replace(self._header, metadata=dict(metadata))
        return other

    def tensor_names(self) -> list[str]:
        """List all tensors, in the order of the file."""
        return list(self._header.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch's order: (out_features, in_features)."""
        return self._header.tensors[name].shape

    def type(self, name: str) -> TensorType:
        return self._header.tensors[name].type

    def type_name(self, name: str) -> str:
        """Name of the storage type, for example `Q4_1`."""
        return self.type(name).name

    def load(self, name: str) -> Tensor | PackedWeight | Fp4Weight | GgmlWeight:
        """Read one tensor.

        The K types, Q5_0, Q5_1 and IQ1 to IQ4 become a `GgmlWeight`, TQ1_0 and TQ2_0 one of Q2_K,
        MXFP4 and NVFP4 an `Fp4Weight`, and Q4_0, Q4_1 and Q8_0 a `PackedWeight`, all without loss.
        F32, F16, BF16 and the integer types keep theirs.

        Raises:
            CheckpointError: the file changed since it was opened, or holds damaged scales.
            UnsupportedModelError: a quantized tensor is no matrix.
        """
        return self.load_rows(name, 0, self.shape(name)[0])

    def load_rows(
        self, name: str, start: int, stop: int, part: int | None = None
    ) -> Tensor | PackedWeight | Fp4Weight | GgmlWeight:
        """Read rows `start` to `stop` of a tensor, or of one matrix of a stack; see `load`."""
        # Imported here: opening a file for its tokenizer must not load what reads weights.
        from appliance.gguf.tensors import read_tensor
        from appliance.kernels.arrays import in_torch

        if self._workers is None:
            self._workers = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "gguf")
        info = self._header.tensors[name]
        info = (info if part is None else info.part(part)).rows(start, stop)
        tensor = read_tensor(info, self._workers)
        return in_torch(tensor) if self._in_torch else tensor

    def zeros(self, count: int) -> Tensor:
        """Return float32 zeros, of the kind that tensors are read as."""
        import numpy as np

        from appliance.kernels import arrays

        found: Tensor = arrays.of_numpy(np.zeros(count, dtype=np.float32))
        return arrays.in_torch(found) if self._in_torch else found
