"""Reads tensors of a model: checked, on the executor's device, and counted by their formats.

Knows no layer and no file format.
"""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.gguf.types import UNPACKED_TYPES, code_bits
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.kernels.weights.weight import dense
from appliance.model.linear import LinearPart
from appliance.model.norm import Norm

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model.source import ModelSource
    from appliance.model.spec import NormSpec

DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_DENSE_DTYPES = frozenset({*DTYPE_NAMES, "float64"})


class TensorReader:
    """Reads single tensors, norms and linears of one source.

    Attributes:
        formats: counts of what was read.
        dtype: of unpacked weights.
    """

    def __init__(
        self,
        source: ModelSource,
        device: torch.device | None,
        dtype: Any,
        *,
        native: bool,
    ) -> None:
        self.names = source.family.names
        self.dtype = dtype
        self.formats = FormatCounts()
        self._source = source
        self._device = device
        self._native = native

    def for_host(self) -> TensorReader:
        """Return a reader that keeps weights in host memory for the CPU library, counting here."""
        reader = copy(self)
        reader._device, reader._native = None, True
        return reader

    def linears(self, index: int, sources: tuple[str, ...], bias: bool) -> list[LinearPart]:
        """Read linears of a layer that have one input."""
        parts = []
        for source in sources:
            name = self.names.in_layer(index, source)
            weight = self.load(f"{name}.weight")
            parts.append(LinearPart(weight, self.dense(f"{name}.bias") if bias else None))
            self.formats.add(self.format(weight), weight.nbytes)
        return parts

    def norm(self, name: str, spec: NormSpec) -> Norm:
        weight = self.dense(f"{name}.weight").float() + spec.offset
        if not spec.centered:
            return Norm(weight, spec.eps)
        bias = self.dense(f"{name}.bias").float() if spec.bias else weight * 0
        return Norm(weight, spec.eps, bias)

    def exact(self, index: int, part: str) -> Tensor:
        """Read a tensor that stays in float32."""
        return dense(self.load(self.names.in_layer(index, part)), "float32")

    def plain_norm(self, width: int, spec: NormSpec) -> Norm:
        """Return a norm whose weight is 1, which no tensor stores."""
        if self._device is None:
            return Norm(arrays.of_numpy(np.ones(width, dtype=np.float32)), spec.eps)
        import torch

        return Norm(torch.ones(width, device=self._device), spec.eps)

    def dense(self, name: str) -> Tensor:
        tensor = self.load(name)
        assert arrays.is_array(tensor), f"{name} is quantized"
        return tensor

    def load(self, name: str) -> Weight:
        """Read a weight in the form that it is stored in."""
        return load_checked(self._source, name, self._device)

    def format(self, weight: Weight) -> str:
        return format_of(weight, self.dtype, self._device, native=self._native)


def load_checked(source: ModelSource, name: str, device: torch.device | None) -> Weight:
    """Load a weight onto a torch device; None leaves it where it was read.

    Raises:
        CheckpointError: the weight holds NaN or infinity.
        UnsupportedModelError: its type needs a `quantization_config`, which is missing.
    """
    weight = source.weights.load(name)
    if arrays.is_array(weight) and arrays.dtype_name(weight.dtype) not in _DENSE_DTYPES:
        raise UnsupportedModelError(
            f"{source.path.name}: tensor {name} has type {weight.dtype}, but config.json has no "
            "quantization_config that says what it means; use the settings of the same checkpoint"
        )
    if device is not None:
        weight = weight.to(device)
    check_finite(weight, source.path, name)
    return weight


def check_finite(weight: Weight, path: Path, name: str) -> None:
    """Check a weight's numbers, or the scales of a packed one.

    Raises:
        CheckpointError: the weight holds NaN or infinity.
    """
    if not _is_finite(weight):
        raise CheckpointError(
            f"{path.name}: tensor {name} holds NaN or infinity; fetch or quantize the model again"
        )


def _is_finite(weight: Weight) -> bool:
    if isinstance(weight, PackedWeight):
        return _all_finite(weight.scale) and _all_finite(weight.offset)
    if isinstance(weight, Fp8Weight | Fp4Weight | GgmlWeight | TrellisWeight):
        return weight.is_finite()
    return _all_finite(weight)


def _all_finite(tensor: Tensor) -> bool:
    """Check the sum first, which decides nearly all cases and is many times faster."""
    if math.isfinite(arrays.total(tensor)):
        return True
    return arrays.is_finite(tensor)


def format_of(weight: Weight, dtype: Any, device: torch.device | None, *, native: bool) -> str:
    """Name a weight's format, and its form in memory if that differs.

    Args:
        dtype: of unpacked weights.
        native: the executor is the CPU library.
    """
    if isinstance(weight, PackedWeight):
        bits = weight.least_bits if native else weight.bits
        if weight.group_size == weight.shape[1]:
            return f"{bits} bits (a scale per row)"
        return f"{bits} bits (groups of {weight.group_size})"
    dtype = arrays.dtype_name(dtype)
    dense = DTYPE_NAMES[dtype]
    # On a CPU torch multiplies none of these, and float32 activations are for checks.
    is_held = device is not None and device.type == "cuda" and dtype != "float32"
    if arrays.is_array(weight):
        return dense
    if isinstance(weight, GgmlWeight):
        name = weight.type_name
        held = f"{name} in {code_bits(name)} bits" if name in UNPACKED_TYPES else name
        return held if is_held or native else f"{name} (held as {dense})"
    if isinstance(weight, Fp8Weight):
        return "fp8" if is_held else f"fp8 (held as {dense})"
    if isinstance(weight, TrellisWeight):
        name = f"{weight.bits}-bit trellis"
        return name if is_held or native else f"{name} (held as {dense})"
    assert isinstance(weight, Fp4Weight)
    name = "mxfp4" if arrays.dtype_name(weight.scale.dtype) == "float8_e8m0fnu" else "nvfp4"
    return name if is_held or native else f"{name} (held as {dense})"


class FormatCounts:
    """Counts bytes by format."""

    def __init__(self) -> None:
        self._layers: Counter[str] = Counter()
        self._head = ""

    def add(self, format: str, nbytes: int) -> None:
        self._layers[format] += nbytes

    def set_head(self, format: str) -> None:
        self._head = format

    def in_words(self) -> str:
        """Describe layers by frequency, then the head."""
        return _joined([name for name, _ in self._layers.most_common()], self._head)


def _joined(formats: Sequence[str], head: str) -> str:
    """Join the layers' formats, most frequent first, and the head's, if any."""
    if not head:
        return " + ".join(formats)
    if list(formats) == [head]:
        return head
    _, bracket, group = formats[0].partition(" (")
    return f"{' + '.join(formats)}, head {head.removesuffix(bracket + group)}"
