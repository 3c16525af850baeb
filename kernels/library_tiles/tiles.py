"""A weight as the CPU library lays it out, with its bytes on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.structs import LANES, Format, Offset, ScaleFormat
from appliance.kernels.weights.ggml_types import SUPERBLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from appliance.kernels.cpu.structs import LinearStruct

_BITS = {
    Format.INT2: 2,
    Format.INT3: 3,
    Format.INT4: 4,
    Format.E2M1: 4,
    Format.IQ4: 4,
    Format.IQ3_S: 4,
    Format.IQ3_XXS: 4,
    Format.IQ2: 3,
    Format.IQ1: 3,
    Format.INT5: 5,
    Format.INT6: 6,
    Format.INT8: 8,
}
_FLOATS = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """Tiles of 16 outputs, see ap_linear in appliance_cpu.h.

    Attributes:
        codes: uint8.
        scales: uint8; None if the weight is not packed.
        offsets: uint8; None if there are none, or if records of scales hold them.
        bias: (out_features,) float32.
        order: (in_features,) int32, the input of each column.
        group: inputs that share a scale.
    """

    codes: Tensor
    scales: Tensor | None
    offsets: Tensor | None
    bias: Tensor | None
    order: Tensor | None
    format: Format
    offset_kind: Offset
    scale_format: Format | ScaleFormat
    group: int
    out_features: int
    in_features: int

    @classmethod
    def of(cls, struct: LinearStruct, parts: Mapping[str, Tensor]) -> LinearTiles:
        """Describe a weight whose bytes, uint8 by the struct's fields, lie anywhere."""
        bias, order = parts.get("bias"), parts.get("input_order")
        scale_format = struct.scale_format
        return cls(
            codes=parts["codes"],
            scales=parts.get("scales"),
            offsets=parts.get("offsets"),
            bias=None if bias is None else bias.view(torch.float32),
            order=None if order is None else order.view(torch.int32),
            format=Format(struct.format),
            offset_kind=Offset(struct.offset_kind),
            scale_format=ScaleFormat(scale_format)
            if scale_format in iter(ScaleFormat)
            else Format(scale_format),
            group=struct.group,
            out_features=struct.out_features,
            in_features=struct.in_features,
        )

    @property
    def num_tiles(self) -> int:
        return -(-self.out_features // LANES)

    @property
    def dtype(self) -> torch.dtype | None:
        """Type of the elements; None if they are codes."""
        return _FLOATS.get(self.format)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return _BITS[self.format]

    @property
    def middle(self) -> int:
        """The code that stands for 0 in a centered format."""
        names_values = self.format is Format.E2M1 or self.format >= Format.IQ4
        return 0 if names_values else 1 << (self.bits - 1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return scale and offset: a weight is code * scale + offset.

        Returns:
            Both (num_tiles, groups, 16) float32.
        """
        assert self.scales is not None
        if self.scale_format in _RECORDS:
            scale, offset = self._of_records(self.scales)
        else:
            scale, offset = self._elements(self.scales), None
            if self.offsets is not None:
                offset = self._elements(self.offsets)
        if offset is None:
            return scale, scale * -float(self.middle)
        if self.offset_kind is Offset.ZERO_POINT:
            offset = -offset * scale
        return scale, offset

    def _elements(self, stored: Tensor) -> Tensor:
        shape = (self.num_tiles, self.in_features // self.group, LANES)
        if self.scale_format is ScaleFormat.E8M0:  # codes count halves
            exponents = stored.int()
            bits = torch.where(exponents == 0, 0x00400000, exponents << 23)
            return (bits.view(torch.float32) * 0.5).view(shape)
        return stored.view(_FLOATS[Format(self.scale_format)]).float().view(shape)

    def _of_records(self, stored: Tensor) -> tuple[Tensor, Tensor | None]:
        """Unpack records of 256 inputs: rows of 16 bytes, then one or two rows of 16 halves."""
        assert isinstance(self.scale_format, ScaleFormat)
        rows, halves = _RECORDS[self.scale_format]
        records = stored.view(self.num_tiles, self.in_features // SUPERBLOCK, -1, LANES)
        integers = records[:, :, :rows].int()
        factors = records[:, :, rows:].contiguous().view(torch.float16).float()
        factors = factors.view(*records.shape[:2], halves, LANES)
        scale, least = _UNPACK[self.scale_format](integers)
        shape = (self.num_tiles, self.in_features // self.group, LANES)
        scale = (scale * factors[:, :, :1]).view(shape)
        if least is None:
            return scale, None
        return scale, (least * -factors[:, :, 1:]).view(shape)


def _signed_bytes(integers: Tensor) -> tuple[Tensor, None]:
    return integers.to(torch.int8).int(), None


def _nibbles(integers: Tensor) -> tuple[Tensor, Tensor]:
    return integers & 15, integers >> 4


def _q3_k(integers: Tensor) -> tuple[Tensor, None]:
    one, two, high = integers[:, :, :4], integers[:, :, 4:8], integers[:, :, 8:]
    low = (one & 15, two & 15, one >> 4, two >> 4)
    parts = [part | (high >> 2 * place & 3) << 4 for place, part in enumerate(low)]
    return torch.cat(parts, dim=2) - 32, None


def _q4_k(integers: Tensor) -> tuple[Tensor, Tensor]:
    one, two, high = integers[:, :, :4], integers[:, :, 4:8], integers[:, :, 8:]
    scale = torch.cat((one & 63, (high & 15) | one >> 6 << 4), dim=2)
    return scale, torch.cat((two & 63, high >> 4 | two >> 6 << 4), dim=2)


def _iq4_xs(integers: Tensor) -> tuple[Tensor, None]:
    high, low = integers[:, :, :2], integers[:, :, 2:]
    nibbles = torch.stack((low & 15, low >> 4), dim=3).flatten(2, 3)
    shifts = torch.arange(0, 8, 2, device=integers.device).view(1, 1, 1, 4, 1)
    pairs = (high.unsqueeze(3) >> shifts & 3).flatten(2, 3)
    return (nibbles | pairs << 4) - 32, None


def _odd(integers: Tensor) -> tuple[Tensor, None]:
    nibbles = torch.stack((integers & 15, integers >> 4), dim=3).flatten(2, 3)
    return (2 * nibbles + 1) * 0.125, None


# Rows of integers and of halves in a record.
_RECORDS = {
    ScaleFormat.Q2_K: (16, 2),
    ScaleFormat.Q3_K: (12, 1),
    ScaleFormat.Q4_K: (12, 2),
    ScaleFormat.Q6_K: (16, 1),
    ScaleFormat.IQ4_XS: (6, 1),
    ScaleFormat.ODD_32: (4, 1),
    ScaleFormat.ODD_16: (8, 1),
}
_UNPACK = {
    ScaleFormat.Q2_K: _nibbles,
    ScaleFormat.Q3_K: _q3_k,
    ScaleFormat.Q4_K: _q4_k,
    ScaleFormat.Q6_K: _signed_bytes,
    ScaleFormat.IQ4_XS: _iq4_xs,
    ScaleFormat.ODD_32: _odd,
    ScaleFormat.ODD_16: _odd,
}
