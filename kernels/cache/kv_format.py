"""The formats in which a KV cache stores keys and values, and the format of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from appliance.kernels import arrays

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class KVFormat(Enum):
    """Storage format of keys and values; "pages" marks those that exist in `KVPages` only."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"  # symmetric, one float16 scale per token and KV head
    # Keys rotated; a float16 scale and offset per token and KV head. Pages, and the CPU library.
    INT4 = "int4"
    FP8 = "fp8"  # E4M3, one calibrated scale per KV head; pages
    # Keys by channel over a full block, values with scale and offset per token and KV head; the
    # last tokens stay INT8 in an open block until their block is sealed. `SealedBlocks`.
    INT4_SEALED = "int4-sealed"
    K8V4 = "k8v4"  # keys as INT8, values as INT4; sealed as well

    @property
    def storage_dtype(self) -> torch.dtype:
        """Element type of `KVBlocks.keys` and `.values`.

        Raises:
            ValueError: blocks of this format are no tensors of elements.
        """
        import torch

        return getattr(torch, self._element)  # type: ignore[no-any-return]

    @property
    def _element(self) -> str:
        if self not in _ELEMENT:
            raise ValueError(f"{self.value} blocks cannot be held as tensors of elements")
        return _ELEMENT[self]

    @property
    def is_quantized(self) -> bool:
        """True if scales accompany the elements."""
        return self not in (KVFormat.FP32, KVFormat.FP16, KVFormat.BF16)

    @property
    def is_sealed(self) -> bool:
        """True if a block's tokens are INT8 until it is full, and then get their final form."""
        return self in (KVFormat.INT4_SEALED, KVFormat.K8V4)

    @property
    def has_elements(self) -> bool:
        """True if blocks can be tensors of elements, `KVBlocks`."""
        return self in _ELEMENT

    @property
    def is_rotated(self) -> bool:
        """True if keys and their queries are Hadamard-transformed after RoPE."""
        return self is KVFormat.INT4

    def bytes_per_token(self, num_kv_heads: int, head_dim: int) -> int:
        """Return the bytes of one token in one layer: keys, values and scales."""
        per_head = head_dim * arrays.numpy_dtype(self._element).itemsize + (
            2 if self.is_quantized else 0
        )
        return 2 * num_kv_heads * per_head


_ELEMENT = {
    KVFormat.FP32: "float32",
    KVFormat.FP16: "float16",
    KVFormat.BF16: "bfloat16",
    KVFormat.INT8: "int8",
}


@dataclass(frozen=True, slots=True)
class LayerPrecision:
    """Storage of one layer's keys and values.

    Attributes:
        format: in which elements or codes.
        head_scales: (2, num_kv_heads) float32, of keys and of values; FP8, None is 1.
        key_mean: (num_kv_heads, head_dim) float32, subtracted from every key after RoPE. It moves
            all scores of a query by the same amount, which a softmax ignores.
    """

    format: KVFormat
    head_scales: Tensor | None = None
    key_mean: Tensor | None = None


def precisions(
    format: KVFormat | Sequence[LayerPrecision], num_layers: int
) -> Sequence[LayerPrecision]:
    """Return the precision of each layer, where a single format stands for all of them."""
    if isinstance(format, KVFormat):
        return (LayerPrecision(format),) * num_layers
    assert len(format) == num_layers, (len(format), num_layers)
    return format
