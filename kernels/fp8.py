"""The 8-bit floating-point weight form: e4m3 codes and their scales. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale, in the block form
E4M3_MAX = 448.0
DEQUANTIZE_AT_ONCE = 1 << 20  # elements
NAN_CODE = 0x7F  # with either sign; e4m3 has no infinity


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """One linear weight of shape (out_features, in_features): w = code * scale.

    Attributes:
        codes: (out_features, in_features) float8_e4m3fn.
        scale: float32, (out_features,) for one scale per output feature, or
            (ceil(out_features / 128), ceil(in_features / 128)) for one per block.
        quantized_inputs: the checkpoint was made for inputs that are quantized to e4m3 too, row by
            row as they come; hardware that multiplies e4m3 may do so.
    """

    codes: Tensor
    scale: Tensor
    quantized_inputs: bool = False

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        assert self.codes.dtype == torch.float8_e4m3fn, self.codes.dtype
        assert self.scale.dtype == torch.float32, self.scale.dtype
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
        """The same weight on a device."""
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device))

    @property
    def column_unit(self) -> int:
        """Inputs between two places where `columns` may cut."""
        return BLOCK if self.is_blockwise else 1

    def columns(self, first: int, last: int) -> Fp8Weight:
        """Select inputs, whole blocks where these have scales; nothing is lost.

        The last block may be smaller than the others.
        """
        unit = self.column_unit
        assert first % unit == 0, (first, unit)
        assert last % unit == 0 or last == self.shape[1], (last, unit)
        codes = self.codes.view(torch.uint8)[:, first:last].contiguous()
        scale = self.scale
        if self.is_blockwise:
            scale = scale[:, first // BLOCK : -(-last // BLOCK)].contiguous()
        return replace(self, codes=codes.view(torch.float8_e4m3fn), scale=scale)

    def is_finite(self) -> bool:
        """Return True if no scale and no code is NaN or infinite."""
        nan = (self.codes.view(torch.uint8) & NAN_CODE) == NAN_CODE
        return bool(torch.isfinite(self.scale).all()) and not bool(nan.any())

    def stacks_with(self, other: Fp8Weight) -> bool:
        """Return True if `other` may follow below this one: no block may hold rows of both."""
        alike = (self.is_blockwise, self.quantized_inputs) == (
            other.is_blockwise,
            other.quantized_inputs,
        )
        return alike and not (self.is_blockwise and self.shape[0] % BLOCK)

    @staticmethod
    def concatenate(parts: list[Fp8Weight]) -> Fp8Weight:
        """Stack weights along the output dimension, each of which stacks with the next."""
        assert all(one.stacks_with(two) for one, two in pairwise(parts))
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        return replace(
            parts[0],
            codes=codes.view(torch.float8_e4m3fn),
            scale=torch.cat([part.scale for part in parts]),
        )

    def row_scales(self) -> Tensor:
        """Scale of each output feature over each 128 inputs: (out_features, blocks) float32."""
        if not self.is_blockwise:
            return self.scale[:, None].expand(-1, -(-self.shape[1] // BLOCK))
        return self.scale.repeat_interleave(BLOCK, dim=0)[: self.shape[0]]

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice = slice(None)) -> Tensor:
        """Some rows of the weight, computed in float64 or float32 and then cast.

        Many are done a few at a time, as wider values in between take more than the result.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes, scales = self.codes[rows], self.row_scales()[rows]
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        step = max(1, DEQUANTIZE_AT_ONCE // self.shape[1])
        for start in range(0, len(codes), step):
            some = slice(start, start + step)
            factors = scales[some].to(wide).repeat_interleave(BLOCK, dim=1)
            out[some] = codes[some].to(wide) * factors[:, : self.shape[1]]
        return out
