"""The packed weight form: integer codes in groups along the input dimension, each with a scale.

Every quantized checkpoint converts to this form without loss, and every matmul kernel starts from
it. Imports nothing of ours but `arrays`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor


DEQUANTIZE_AT_ONCE = 1 << 20  # elements
SMALLEST_GROUP = 32  # the smallest that all kernels multiply


class OffsetKind(Enum):
    """Meaning of `PackedWeight.offset`; both keep their source's 16-bit values exactly."""

    ADDITIVE = "additive"  # w = q * scale + offset        (GGUF Q4_0, Q4_1, Q8_0; symmetric)
    ZERO_POINT = "zero_point"  # w = (q - offset) * scale  (AWQ, GPTQ, asymmetric)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One linear weight of shape (out_features, in_features), quantized in groups.

    Attributes:
        codes: (out_features, in_features * bits / 8) uint8. With 4 bits, byte j of a row holds
            the codes of inputs 2j (low nibble) and 2j + 1 (high nibble). Codes are unsigned.
        scale: (out_features, in_features / group_size) float16, bfloat16 or float32; may be
            negative.
        offset: same shape and dtype as scale; its meaning is `offset_kind`.
        bits: 4 or 8.
        group_size: inputs that share a scale; divides in_features.
        input_order: (in_features,) int32, the input that each column of the codes belongs to;
            None where columns stand in the order of the inputs. GPTQ's act-order needs it: it puts
            distant inputs into one group.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    offset_kind: OffsetKind
    bits: int
    group_size: int
    input_order: Tensor | None = None

    def __post_init__(self) -> None:
        out_features, in_features = self.shape
        groups = (out_features, in_features // self.group_size)
        assert self.bits in (4, 8), self.bits
        assert in_features % self.group_size == 0, (in_features, self.group_size)
        assert tuple(self.scale.shape) == groups, (self.scale.shape, groups)
        assert tuple(self.offset.shape) == groups, (self.offset.shape, groups)
        if self.input_order is not None:
            assert arrays.dtype_name(self.input_order.dtype) == "int32", self.input_order.dtype
            assert tuple(self.input_order.shape) == (in_features,), self.input_order.shape

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales, offsets and the order of the inputs."""
        order = 0 if self.input_order is None else self.input_order.nbytes
        return self.codes.nbytes + self.scale.nbytes + self.offset.nbytes + order

    @property
    def least_bits(self) -> int:
        """Bits in which all codes fit, 2, 3, 4 or 8: those of 3 and 2 bits stand in 4 here."""
        if self.bits == 8:
            return 8
        return next((bits for bits in (2, 3) if self._fits(bits)), 4)

    def _fits(self, bits: int) -> bool:
        """Return True if no code of 4 bits needs more than `bits`."""
        above = (0xF << bits & 0xF) * 0x11
        step = max(1, DEQUANTIZE_AT_ONCE // self.codes.shape[1])
        rows = range(0, self.shape[0], step)
        return not any(bool((self.codes[row : row + step] & above).any()) for row in rows)

    def to(self, device: torch.device) -> PackedWeight:
        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            offset=self.offset.to(device),
            input_order=None if self.input_order is None else self.input_order.to(device),
        )

    def rows(self, index: arrays.Rows) -> PackedWeight:
        """Select output rows without repacking."""
        return replace(
            self, codes=self.codes[index], scale=self.scale[index], offset=self.offset[index]
        )

    @property
    def column_unit(self) -> int | None:
        """Inputs between places where `columns` may cut; None if inputs have an order."""
        if self.input_order is not None:
            return None
        return SMALLEST_GROUP if self.group_size % SMALLEST_GROUP == 0 else self.group_size

    def columns(self, first: int, last: int) -> PackedWeight:
        """Select inputs without repacking; if groups are cut, all become groups of 32."""
        unit = self.column_unit
        assert unit is not None, "inputs in an order of their own"
        assert first % unit == 0, (first, unit)
        assert last % unit == 0, (last, unit)
        group = unit if first % self.group_size or last % self.group_size else self.group_size
        repeats = self.group_size // group
        groups = slice(first // group, last // group)
        return replace(
            self,
            codes=self.codes[:, first * self.bits // 8 : last * self.bits // 8].contiguous(),
            scale=arrays.repeated(self.scale, repeats, 1)[:, groups].contiguous(),
            offset=arrays.repeated(self.offset, repeats, 1)[:, groups].contiguous(),
            group_size=group,
        )

    def unpack(self) -> Tensor:
        """Return codes one per byte in stored order, (out_features, in_features) uint8."""
        if self.bits == 8:
            return self.codes
        codes: Tensor = arrays.stack((self.codes & 0xF, self.codes >> 4), dim=-1).flatten(1)
        return codes

    def dequantize(self, dtype: Any = "float32") -> Tensor:
        """Return exact weights, (out_features, in_features), computed in float32, then cast.

        Large weights are done a few rows at a time: float32 intermediates take several times the
        memory of the result.
        """
        out_features, in_features = self.shape
        step = max(1, DEQUANTIZE_AT_ONCE // in_features)
        out: Tensor = arrays.empty(self.shape, dtype, self.codes)
        order = None if self.input_order is None else self.input_order.long()
        for start in range(0, out_features, step):
            rows = slice(start, start + step)
            values = self.rows(rows)._dequantize()
            if order is None:
                out[rows] = arrays.cast(values, dtype)
            else:
                out[rows, order] = arrays.cast(values, dtype)
        return out

    def _dequantize(self) -> Tensor:
        """Return weights in float32, columns in the order of the codes."""
        q = self.unpack().float().view(self.shape[0], -1, self.group_size)
        scale, offset = self.scale.float().unsqueeze(-1), self.offset.float().unsqueeze(-1)
        if self.offset_kind is OffsetKind.ZERO_POINT:
            q -= offset
            q *= scale
        else:
            q *= scale
            q += offset
        return q.view(self.shape)

    @staticmethod
    def concatenate(parts: list[PackedWeight]) -> PackedWeight:
        """Stack weights of one kind along the output dimension, as for a fused q/k/v."""
        assert all(part.stacks_with(parts[0]) for part in parts)
        return replace(
            parts[0],
            codes=arrays.cat([part.codes for part in parts]),
            scale=arrays.cat([part.scale for part in parts]),
            offset=arrays.cat([part.offset for part in parts]),
        )

    def stacks_with(self, other: PackedWeight) -> bool:
        """Return True if `concatenate` takes both."""
        one, two = self.input_order, other.input_order
        same_order = one is two if one is None or two is None else arrays.equal(one, two)
        return same_order and (self.bits, self.group_size, self.offset_kind, self.scale.dtype) == (
            other.bits,
            other.group_size,
            other.offset_kind,
            other.scale.dtype,
        )
