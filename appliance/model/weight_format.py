"""Names the formats of weights for people. Knows no file format."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.kernels.fp4 import Fp4Weight
from appliance.kernels.fp8 import Fp8Weight
from appliance.kernels.ggml import GgmlWeight
from appliance.kernels.packed import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from appliance.kernels.weight import Weight

DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def format_of(weight: Weight, dtype: Any, device: torch.device | None, *, native: bool) -> str:
    """Name a weight's format, and its form in memory if that differs.

    Args:
        dtype: of unpacked weights.
        native: the executor is the CPU library.
    """
    if isinstance(weight, PackedWeight):
        if weight.group_size == weight.shape[1]:
            return f"{weight.bits} bits (a scale per row)"
        return f"{weight.bits} bits (groups of {weight.group_size})"
    dtype = arrays.dtype_name(dtype)
    dense = DTYPE_NAMES[dtype]
    # On a CPU torch multiplies none of these, and float32 activations are for checks.
    is_held = device is not None and device.type == "cuda" and dtype != "float32"
    if arrays.is_array(weight):
        return dense
    if isinstance(weight, GgmlWeight):
        return weight.type_name if is_held or native else f"{weight.type_name} (held as {dense})"
    if isinstance(weight, Fp8Weight):
        return "fp8" if is_held else f"fp8 (held as {dense})"
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
