"""Measures a checkpoint's stored size, scales and zero points included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.gguf.header import read_header
from appliance.kernels.arrays import numpy_dtype
from appliance.model_files.checkpoint import SafetensorsFolder

if TYPE_CHECKING:
    from appliance.model.source import ModelSource

GGUF_LAYERS = "blk."  # prefix of the names of a layer's tensors


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Parameters and bytes of a checkpoint.

    Attributes:
        linear_bytes: of these, scales and zero points included.
    """

    parameters: int
    stored_bytes: int
    linear_parameters: int
    linear_bytes: int


def stored_size(source: ModelSource) -> StoredSize:
    """Measure an opened model by its headers."""
    slots = source.slots()
    linears = [slot for slot in slots if slot.is_linear]
    if source.path.is_file():
        tensors = read_header(source.path).tensors.values()
        stored_bytes = sum(tensor.nbytes for tensor in tensors)
        linear_bytes = sum(
            tensor.nbytes
            for tensor in tensors
            if tensor.name.startswith(GGUF_LAYERS) and len(tensor.shape) == 2
        )
    else:
        folder = SafetensorsFolder(source.path)
        sizes = {
            name: math.prod(folder.shape(name)) * numpy_dtype(folder.dtype(name)).itemsize
            for name in folder.tensor_names()
        }
        stored_bytes = sum(sizes.values())
        # All tensors with a linear's module name belong to its weight, except the bias.
        modules = {slot.name.removesuffix(".weight") for slot in linears}
        linear_bytes = sum(
            size
            for name, size in sizes.items()
            if name.rpartition(".")[0] in modules and not name.endswith(".bias")
        )
    return StoredSize(
        parameters=sum(math.prod(slot.shape) for slot in slots),
        stored_bytes=stored_bytes,
        linear_parameters=sum(math.prod(slot.shape) for slot in linears),
        linear_bytes=linear_bytes,
    )
