"""The 8-bit floating-point weight form: e4m3 codes with their scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor


BLOCK = 128  # rows and columns that share a scale, in the block form
E4M3_MAX = 448.0
DEQUANTIZE_AT_ONCE = 1 << 20  # elements
NAN_CODE = 0x7F  # and with the sign bit; e4m3 has no infinity


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """One linear weight of shape (out_features, in_features): w = code * scale.

    Attributes:
        codes: (out_features, in_features) float8_e4m3fn.
        scale: float32, (out_features,) for one scale per output feature, or
            (ceil(out_features / 128), ceil(in_features / 128)) for one per block.
        quantized_inputs: the checkpoint expects inputs quantized to e4m3 at run time, row by row;
            hardware that multiplies e4m3 may do so.
    """

    codes: Tensor
    scale: Tensor
    quantized_inputs: bool = False

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert arrays.dtype_name(self.codes.dtype) == "float8_e4m3fn", self.codes.dtype
        assert arrays.dtype_name(self.scale.dtype) == "float32", self.scale.dtype
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        assert tuple(self.scale.shape) in ((rows,), blocks), (self.scale.shape, blocks)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def is_blockwise(self) -> bool:
        """True if a scale belongs to a block, not to an output feature."""
        return self.scale.dim() == 2

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> Fp8Weight:
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))

    def padded(self, index: Tensor) -> Fp8Weight:
        """Repeat rows behind the last: `index` begins with all rows, and lists no block more."""
        codes = arrays.viewed(self.codes, "uint8")[index]
        scale = self.scale if self.is_blockwise else self.scale[index]
        return replace(self, codes=arrays.viewed(codes, self.codes.dtype), scale=scale)

    @property
    def column_unit(self) -> int:
        """Inputs between places where `columns` may cut."""
        return BLOCK if self.is_blockwise else 1

    def columns(self, first: int, last: int) -> Fp8Weight:
        """Select inputs, whole blocks if blocks have scales, without loss.

        The last block may be smaller than the others.
        """
        unit = self.column_unit
        assert first % unit == 0, (first, unit)
        assert last % unit == 0 or last == self.shape[1], (last, unit)
        codes = arrays.viewed(self.codes, "uint8")[:, first:last].contiguous()
        scale = self.scale
        if self.is_blockwise:
            scale = scale[:, first // BLOCK : -(-last // BLOCK)].contiguous()
        return replace(self, codes=arrays.viewed(codes, self.codes.dtype), scale=scale)

    def rows(self, first: int, last: int) -> Fp8Weight | None:
        """Select outputs without loss; None if that cuts blocks."""
        codes = arrays.viewed(arrays.viewed(self.codes, "uint8")[first:last], self.codes.dtype)
        if not self.is_blockwise:
            return replace(self, codes=codes, scale=self.scale[first:last])
        if first % BLOCK or (last % BLOCK and last != self.shape[0]):
            return None
        return replace(self, codes=codes, scale=self.scale[first // BLOCK : -(-last // BLOCK)])

    def is_finite(self) -> bool:
        """Return True if no scale and no code is NaN or infinite."""
        nan = (arrays.viewed(self.codes, "uint8") & NAN_CODE) == NAN_CODE
        return arrays.is_finite(self.scale) and not bool(nan.any())

    def stacks_with(self, other: Fp8Weight) -> bool:
        """Return True if `other` may follow below this one: no block may span rows of both."""
        alike = (self.is_blockwise, self.quantized_inputs) == (
            other.is_blockwise,
            other.quantized_inputs,
        )
        return alike and not (self.is_blockwise and self.shape[0] % BLOCK)

    @staticmethod
    def concatenate(parts: list[Fp8Weight]) -> Fp8Weight:
        """Stack weights along the output dimension, each of which stacks with the next."""
        assert all(one.stacks_with(two) for one, two in pairwise(parts))
        codes = arrays.cat([arrays.viewed(part.codes, "uint8") for part in parts])
        return replace(
            parts[0],
            codes=arrays.viewed(codes, "float8_e4m3fn"),
            scale=arrays.cat([part.scale for part in parts]),
        )

    def row_scales(self) -> Tensor:
        """Return each output feature's scale per 128 inputs, (out_features, blocks) float32."""
        if not self.is_blockwise:
            return self.scale[:, None].expand(len(self.scale), -(-self.shape[1] // BLOCK))
        scales: Tensor = arrays.repeated(self.scale, BLOCK, 0)[: self.shape[0]]
        return scales

    def dequantize(self, dtype: Any = "float32", rows: slice = slice(None)) -> Tensor:
        """Return some rows of the weight, computed in float64 or float32, then cast.

        Large selections are done a few rows at a time, as intermediates are larger than the result.
        """
        wide = "float64" if arrays.dtype_name(dtype) == "float64" else "float32"
        codes, scales = self.codes[rows], self.row_scales()[rows]
        out: Tensor = arrays.empty(codes.shape, dtype, codes)
        step = max(1, DEQUANTIZE_AT_ONCE // self.shape[1])
        for start in range(0, len(codes), step):
            some = slice(start, start + step)
            factors = arrays.repeated(arrays.cast(scales[some], wide), BLOCK, 1)
            product = arrays.cast(codes[some], wide) * factors[:, : self.shape[1]]
            out[some] = arrays.cast(product, dtype)
        return out
