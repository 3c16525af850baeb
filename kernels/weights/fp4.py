"""The 4-bit floating-point weight form: e2m1 codes with 8-bit scales.

OCP's MXFP4 has a power of two (e8m0) for 32 inputs; NVIDIA's NVFP4 has e4m3 for 16 inputs and one
float32 for the whole weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.kernels import arrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# Values of the three low bits of a code; the fourth is the sign. Doubled they are integers.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUPS = {"float8_e8m0fnu": 32, "float8_e4m3fn": 16}  # inputs that share a scale
DEQUANTIZE_AT_ONCE = 1 << 20  # elements


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """One linear weight of shape (out_features, in_features): w = code * scale * row_scale.

    Attributes:
        codes: (out_features, in_features / 2) uint8; byte j of a row holds the codes of inputs 2j
            (low nibble) and 2j + 1 (high nibble).
        scale: (out_features, in_features / group) float8_e8m0fnu in groups of 32, or
            float8_e4m3fn in groups of 16.
        row_scale: (out_features,) float32, a further factor.
    """

    codes: Tensor
    scale: Tensor
    row_scale: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.shape
        assert arrays.dtype_name(self.codes.dtype) == "uint8", self.codes.dtype
        assert arrays.dtype_name(self.scale.dtype) in GROUPS, self.scale.dtype
        assert columns % self.group_size == 0, (columns, self.group_size)
        groups = (rows, columns // self.group_size)
        assert tuple(self.scale.shape) == groups, (self.scale.shape, groups)
        assert arrays.dtype_name(self.row_scale.dtype) == "float32", self.row_scale.dtype
        assert tuple(self.row_scale.shape) == (rows,), self.row_scale.shape

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return GROUPS[arrays.dtype_name(self.scale.dtype)]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes + self.row_scale.nbytes

    def to(self, device: torch.device) -> Fp4Weight:
        return Fp4Weight(self.codes.to(device), self.scale.to(device), self.row_scale.to(device))

    def rows(self, index: arrays.Rows) -> Fp4Weight:
        """Select output rows, without loss."""
        scale = arrays.viewed(arrays.viewed(self.scale, "uint8")[index], self.scale.dtype)
        return Fp4Weight(self.codes[index], scale, self.row_scale[index])

    @property
    def column_unit(self) -> int:
        """Inputs between places where `columns` may cut."""
        return self.group_size

    def columns(self, first: int, last: int) -> Fp4Weight:
        """Select inputs, whole groups, without loss."""
        assert first % self.group_size == 0, (first, self.group_size)
        assert last % self.group_size == 0, (last, self.group_size)
        groups = slice(first // self.group_size, last // self.group_size)
        scale = arrays.viewed(self.scale, "uint8")[:, groups].contiguous()
        codes = self.codes[:, first // 2 : last // 2].contiguous()
        return Fp4Weight(codes, arrays.viewed(scale, self.scale.dtype), self.row_scale)

    def is_finite(self) -> bool:
        """Return True if no scale is NaN or infinite; every code is finite."""
        return all(arrays.is_finite(t.float()) for t in (self.scale, self.row_scale))

    def stacks_with(self, other: Fp4Weight) -> bool:
        """Return True if `other` may follow below this one."""
        return self.scale.dtype == other.scale.dtype and self.shape[1] == other.shape[1]

    @staticmethod
    def concatenate(parts: list[Fp4Weight]) -> Fp4Weight:
        """Stack weights of one kind along the output dimension, as for a fused q/k/v."""
        assert all(part.stacks_with(parts[0]) for part in parts)
        scale = arrays.cat([arrays.viewed(part.scale, "uint8") for part in parts])
        return Fp4Weight(
            arrays.cat([part.codes for part in parts]),
            arrays.viewed(scale, parts[0].scale.dtype),
            arrays.cat([part.row_scale for part in parts]),
        )

    def unpack(self) -> Tensor:
        """Return codes one per byte, (out_features, in_features) uint8."""
        codes: Tensor = arrays.stack((self.codes & 0xF, self.codes >> 4), dim=-1).flatten(1)
        return codes

    def dequantize(self, dtype: Any = "float32") -> Tensor:
        """Return weights (out_features, in_features), computed in float64 or float32, then cast."""
        wide = "float64" if arrays.dtype_name(dtype) == "float64" else "float32"
        out: Tensor = arrays.empty(self.shape, dtype, self.codes)
        step = max(1, DEQUANTIZE_AT_ONCE // self.shape[1])
        for start in range(0, self.shape[0], step):
            some = slice(start, start + step)
            part = self.rows(some)
            factors = arrays.cast(part.scale, wide) * arrays.cast(part.row_scale, wide)[:, None]
            values = part._values(wide).view(*factors.shape, self.group_size)
            out[some] = arrays.cast((values * factors[:, :, None]).flatten(1), dtype)
        return out

    def _values(self, dtype: str) -> Tensor:
        """Return the value of each code, (out_features, in_features)."""
        values = np.array((*VALUES, *(-value for value in VALUES)), dtype=dtype)
        found: Tensor = arrays.like(self.codes, values)[self.unpack().long()]
        return found
