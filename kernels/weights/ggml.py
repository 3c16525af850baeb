"""A weight in the blocks of a GGML type, as a GGUF file stores it.

The blocks are the whole weight: nothing is rounded, and it takes as much memory as in the file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.kernels.weights.ggml_types import GGML_TYPES, Decoded, GgmlType, half_at

if TYPE_CHECKING:
    import torch
    from torch import Tensor


DEQUANTIZE_AT_ONCE = 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class GgmlWeight:
    """One linear weight of shape (out_features, in_features).

    Attributes:
        type_name: a key of `GGML_TYPES`, such as `Q4_K`.
        blocks: (out_features, blocks, bytes of a block) uint8.
        input_order: (in_features,) int32, the input that each column belongs to; None where columns
            stand in the order of the inputs.
    """

    type_name: str
    blocks: Tensor
    input_order: Tensor | None = None

    def __post_init__(self) -> None:
        assert arrays.dtype_name(self.blocks.dtype) == "uint8", self.blocks.dtype
        assert self.blocks.shape[2] == self.type.block_bytes, (self.type_name, self.blocks.shape)
        if self.input_order is not None:
            assert arrays.dtype_name(self.input_order.dtype) == "int32", self.input_order.dtype
            assert tuple(self.input_order.shape) == (self.shape[1],), self.input_order.shape

    @property
    def type(self) -> GgmlType:
        """The layout of its blocks."""
        return GGML_TYPES[self.type_name]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.blocks.shape[0], self.blocks.shape[1] * self.type.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks and the order of the inputs."""
        order = 0 if self.input_order is None else self.input_order.nbytes
        return self.blocks.nbytes + order

    def to(self, device: torch.device) -> GgmlWeight:
        order = None if self.input_order is None else self.input_order.to(device)
        return replace(self, blocks=self.blocks.to(device), input_order=order)

    def rows(self, index: arrays.Rows) -> GgmlWeight:
        """Select output rows, without loss."""
        return replace(self, blocks=self.blocks[index])

    @property
    def column_unit(self) -> int | None:
        """Inputs between places where `columns` may cut; None if inputs have an order."""
        return None if self.input_order is not None else self.type.block_size

    def columns(self, first: int, last: int) -> GgmlWeight:
        """Select inputs, whole blocks, without loss."""
        size = self.column_unit
        assert size is not None, "inputs in an order of their own"
        assert first % size == 0, (first, size)
        assert last % size == 0, (last, size)
        return replace(self, blocks=self.blocks[:, first // size : last // size].contiguous())

    def is_finite(self) -> bool:
        """Return True if no scale is NaN or infinite."""
        return all(arrays.is_finite(half_at(self.blocks, start)) for start in self.type.halves)

    def decode(self) -> Decoded:
        """Decode all codes and scales, columns in stored order; takes several times the memory."""
        return self.type.decode(self.blocks)

    def dequantize(self, dtype: Any = "float32") -> Tensor:
        """Return exact weights, (out_features, in_features), computed in float32, then cast.

        Large weights are done a few rows at a time.
        """
        out: Tensor = arrays.empty(self.shape, dtype, self.blocks)
        order = None if self.input_order is None else self.input_order.long()
        step = max(1, DEQUANTIZE_AT_ONCE // self.shape[1])
        for start in range(0, self.shape[0], step):
            rows = slice(start, start + step)
            values = self.rows(rows).decode().weights()
            if order is None:
                out[rows] = arrays.cast(values, dtype)
            else:
                out[rows, order] = arrays.cast(values, dtype)
        return out

    def stacks_with(self, other: GgmlWeight) -> bool:
        """Return True if `concatenate` takes both."""
        one, two = self.input_order, other.input_order
        same_order = one is two if one is None or two is None else arrays.equal(one, two)
        return same_order and self.type_name == other.type_name and self.shape[1] == other.shape[1]

    @staticmethod
    def concatenate(parts: list[GgmlWeight]) -> GgmlWeight:
        """Stack weights of one type along the output dimension, as for a fused q/k/v."""
        assert all(part.stacks_with(parts[0]) for part in parts)
        return replace(parts[0], blocks=arrays.cat([part.blocks for part in parts]))
