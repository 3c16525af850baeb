"""The 8-bit floating-point weight form: e4m3 codes and their scales. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale, in the block form
E4M3_MAX = 448.0
NAN_CODE = 0x7F  # with either sign; e4m3 has no infinity


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """One linear weight of shape (out_features, in_features): w = code * scale.

    Attributes:
        codes: (out_features, in_features) float8_e4m3fn.
        scale: float32, (out_features,) for one scale per output feature, or
            (ceil(out_features / 128), ceil(in_features / 128)) for one per block.
    """

    codes: Tensor
    scale: Tensor

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
        """Whether a scale belongs to a block, not to an output feature."""
        return self.scale.dim() == 2

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def row_scales(self) -> Tensor:
        """Scale of each output feature over each 128 inputs: (out_features, blocks) float32."""
        if not self.is_blockwise:
            return self.scale[:, None].expand(-1, -(-self.shape[1] // BLOCK))
        return self.scale.repeat_interleave(BLOCK, dim=0)[: self.shape[0]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Weights (out_features, in_features), computed in float64 or float32 and then cast."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scales = self.row_scales().to(wide).repeat_interleave(BLOCK, dim=1)
        return (self.codes.to(wide) * scales[:, : self.shape[1]]).to(dtype)
