"""Lays weights out for the library: tiles of 16 outputs in an arena."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from appliance.kernels import arrays
from appliance.kernels.cpu.engine import NativeEngine, check
from appliance.kernels.cpu.structs import (
    LANES,
    Format,
    LinearStruct,
    NormStruct,
    Offset,
    ScaleFormat,
)
from appliance.kernels.cpu.weight_bytes import codes_bytes, scales_bytes
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.kernels.weights.trellis import BLOCK, TrellisWeight
from appliance.kernels.weights.weight import dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from appliance.kernels.cpu.arena import Arena
    from appliance.kernels.weights.weight import Weight

GROUP_SIZES = (128, 64, 32)
FORMATS = {
    "float32": Format.F32,
    "float16": Format.F16,
    "bfloat16": Format.BF16,
}
_SCALE_FORMATS = FORMATS | {"uint8": ScaleFormat.E8M0}


@dataclass(frozen=True, slots=True)
class GgmlForm:
    """The form of a GGML type's blocks in tiles."""

    format: Format
    offset_kind: Offset
    scale_format: Format | ScaleFormat
    group: int


GGML_FORMS = {
    "Q5_0": GgmlForm(Format.INT5, Offset.CENTERED, Format.F16, 32),
    "Q5_1": GgmlForm(Format.INT5, Offset.ADDITIVE, Format.F16, 32),
    "Q2_K": GgmlForm(Format.INT2, Offset.ADDITIVE, ScaleFormat.Q2_K, 16),
    "Q3_K": GgmlForm(Format.INT3, Offset.CENTERED, ScaleFormat.Q3_K, 16),
    "Q4_K": GgmlForm(Format.INT4, Offset.ADDITIVE, ScaleFormat.Q4_K, 32),
    "Q5_K": GgmlForm(Format.INT5, Offset.ADDITIVE, ScaleFormat.Q4_K, 32),
    "Q6_K": GgmlForm(Format.INT6, Offset.CENTERED, ScaleFormat.Q6_K, 16),
    "IQ4_NL": GgmlForm(Format.IQ4, Offset.CENTERED, Format.F16, 32),
    "IQ4_XS": GgmlForm(Format.IQ4, Offset.CENTERED, ScaleFormat.IQ4_XS, 32),
    "IQ3_S": GgmlForm(Format.IQ3_S, Offset.CENTERED, ScaleFormat.ODD_32, 32),
    "IQ3_XXS": GgmlForm(Format.IQ3_XXS, Offset.CENTERED, ScaleFormat.ODD_32, 32),
    "IQ2_XXS": GgmlForm(Format.IQ2, Offset.CENTERED, ScaleFormat.ODD_32, 32),
    "IQ2_XS": GgmlForm(Format.IQ2, Offset.CENTERED, ScaleFormat.ODD_16, 16),
    "IQ2_S": GgmlForm(Format.IQ2, Offset.CENTERED, ScaleFormat.ODD_16, 16),
    "IQ1_S": GgmlForm(Format.IQ1, Offset.CENTERED, ScaleFormat.ODD_32, 32),
    "IQ1_M": GgmlForm(Format.IQ1, Offset.CENTERED, ScaleFormat.ODD_16, 16),
}
TRELLIS_FORMATS = {2: Format.INT2, 3: Format.INT3, 4: Format.INT4, 5: Format.INT5}


@dataclass(frozen=True, slots=True)
class WeightPacker:
    """Lays weights out in an arena.

    Attributes:
        engine: its threads pack.
        arena: receives the tiles.
        dtype: of weights that are not packed, in FP8, or in groups that the library does not
            multiply.
    """

    engine: NativeEngine
    arena: Arena
    dtype: Any
    _orders: dict[bytes, int] = field(default_factory=dict)  # addresses, one for each order

    def linear(self, weight: Weight, bias: Tensor | None = None) -> LinearStruct:
        """Lay out a weight (out_features, in_features) and its bias (out_features,)."""
        if isinstance(weight, Fp4Weight):
            struct = self._fp4(weight)
        elif isinstance(weight, GgmlWeight):
            struct = self._ggml(weight)
        elif isinstance(weight, TrellisWeight):
            struct = self._trellis(weight)
        elif isinstance(weight, PackedWeight) and kernel_group(weight.group_size) is not None:
            struct = self._packed(weight)
        else:
            struct = self._dense(dense(weight, self.dtype))
        if bias is not None:
            struct.bias = self.floats(bias)
        return struct

    def codes(self, codes: Tensor) -> LinearStruct:
        """Lay out bytes (out_features, in_features) that stand for themselves minus 128."""
        out_features, in_features = codes.shape
        struct = LinearStruct(
            format=Format.INT8,
            offset_kind=Offset.CENTERED,
            scale_format=ScaleFormat.NONE,
            group=LANES,
            in_features=in_features,
            out_features=out_features,
        )
        struct.codes = self.arena.claim(codes_bytes(struct))
        self._pack(struct, codes.contiguous(), None, None, LANES)
        return struct

    def norm(self, weight: Tensor, eps: float, bias: Tensor | None = None) -> NormStruct:
        """Lay out a norm's weight (width,), and the bias that makes it a LayerNorm."""
        return NormStruct(self.floats(weight), eps, None if bias is None else self.floats(bias))

    def floats(self, values: Tensor) -> int:
        """Return the address of a copy in float32."""
        values = values.detach().float().contiguous()
        address = self.arena.claim(values.nbytes)
        ctypes.memmove(address, values.data_ptr(), values.nbytes)
        return address

    def integers(self, values: Sequence[int]) -> int:
        """Return the address of a copy in 32 bits."""
        array = (ctypes.c_int32 * len(values))(*values)
        address = self.arena.claim(ctypes.sizeof(array))
        ctypes.memmove(address, array, ctypes.sizeof(array))
        return address

    def structs(self, kind: type[ctypes.Structure], items: Sequence[ctypes.Structure]) -> int:
        """Return the address of a copy of structs, one after another."""
        array = (kind * len(items))(*items)
        address = self.arena.claim(ctypes.sizeof(array))
        ctypes.memmove(address, array, ctypes.sizeof(array))
        self.arena.structs.append((address, kind, len(items)))
        return address

    def _dense(self, weight: Tensor) -> LinearStruct:
        weight = weight.contiguous()
        out_features, in_features = weight.shape
        struct = LinearStruct(
            format=FORMATS[arrays.dtype_name(self.dtype)],
            in_features=in_features,
            out_features=out_features,
        )
        struct.codes = self.arena.claim(codes_bytes(struct))
        self._pack(struct, weight, None, None, 0)
        return struct

    def _packed(self, weight: PackedWeight) -> LinearStruct:
        group = kernel_group(weight.group_size)
        assert group is not None
        out_features, in_features = weight.shape
        bits = weight.least_bits
        centered = is_centered(weight, 1 << (bits - 1))
        offset = None if centered else weight.offset.contiguous()
        scale = weight.scale.contiguous()
        is_half = all(fits_half(values) for values in (scale, offset) if values is not None)
        struct = LinearStruct(
            format=_OF_BITS[bits],
            offset_kind=Offset.CENTERED if centered else _OFFSETS[weight.offset_kind],
            scale_format=Format.F16 if is_half else Format.F32,
            group=group,
            in_features=in_features,
            out_features=out_features,
        )
        struct.codes = self.arena.claim(codes_bytes(struct))
        struct.scales = self.arena.claim(scales_bytes(struct))
        if offset is not None:
            struct.offsets = self.arena.claim(scales_bytes(struct))
        self._pack(struct, weight.codes.contiguous(), scale, offset, weight.group_size)
        if weight.input_order is not None:
            struct.input_order = self._order(weight.input_order)
        return struct

    def _ggml(self, weight: GgmlWeight) -> LinearStruct:
        """Keep codes, scales and offsets as they are, in as much memory as the blocks."""
        form = GGML_FORMS[weight.type_name]
        out_features, in_features = weight.shape
        struct = LinearStruct(
            format=form.format,
            offset_kind=form.offset_kind,
            scale_format=form.scale_format,
            group=form.group,
            in_features=in_features,
            out_features=out_features,
        )
        struct.codes = self.arena.claim(codes_bytes(struct))
        struct.scales = self.arena.claim(scales_bytes(struct))
        if form.offset_kind is Offset.ADDITIVE and form.scale_format is Format.F16:
            struct.offsets = self.arena.claim(scales_bytes(struct))
        blocks = weight.blocks.contiguous()
        check(
            self.engine.library.ap_linear_pack_ggml(
                self.engine.handle, ctypes.byref(struct), weight.type.number, blocks.data_ptr()
            )
        )
        if weight.input_order is not None:
            struct.input_order = self._order(weight.input_order)
        return struct

    def _trellis(self, weight: TrellisWeight) -> LinearStruct:
        """Keep symbols and scales, in as much memory as the blocks."""
        out_features, in_features = weight.shape
        struct = LinearStruct(
            format=TRELLIS_FORMATS[weight.bits],
            offset_kind=Offset.CENTERED,
            scale_format=ScaleFormat.TRELLIS,
            group=BLOCK,
            in_features=in_features,
            out_features=out_features,
        )
        struct.codes = self.arena.claim(codes_bytes(struct))
        struct.scales = self.arena.claim(scales_bytes(struct))
        symbols, scale = weight.symbols.contiguous(), weight.scale.float().contiguous()
        check(
            self.engine.library.ap_linear_pack_trellis(
                self.engine.handle, ctypes.byref(struct), symbols.data_ptr(), scale.data_ptr()
            )
        )
        return struct

    def _fp4(self, weight: Fp4Weight) -> LinearStruct:
        """Keep codes, and scales that are powers of two.

        Other scales become floats, halved, since codes count halves.
        """
        out_features, in_features = weight.shape
        is_power = arrays.dtype_name(weight.scale.dtype) == "float8_e8m0fnu"
        powers = is_power and bool((weight.row_scale == 1).all())
        if powers:
            scale = arrays.viewed(weight.scale, "uint8")
        else:
            scale = weight.scale.float() * (weight.row_scale * 0.5)[:, None]
        half_or_float = Format.F16 if fits_half(scale) else Format.F32
        scale_format = ScaleFormat.E8M0 if powers else half_or_float
        struct = LinearStruct(
            format=Format.E2M1,
            offset_kind=Offset.CENTERED,
            scale_format=scale_format,
            group=weight.group_size,
            in_features=in_features,
            out_features=out_features,
        )
        struct.codes = self.arena.claim(codes_bytes(struct))
        struct.scales = self.arena.claim(scales_bytes(struct))
        self._pack(struct, weight.codes.contiguous(), scale.contiguous(), None, weight.group_size)
        return struct

    def _order(self, order: Tensor) -> int:
        """Return the address of a copy; weights of one input that share it share codes of rows."""
        values = order.contiguous().numpy().tobytes()
        if values not in self._orders:
            self._orders[values] = self.arena.claim(len(values))
            ctypes.memmove(self._orders[values], values, len(values))
        return self._orders[values]

    def _pack(
        self,
        struct: LinearStruct,
        codes: Tensor,
        scale: Tensor | None,
        offset: Tensor | None,
        group_size: int,
    ) -> None:
        check(
            self.engine.library.ap_linear_pack(
                self.engine.handle,
                ctypes.byref(struct),
                codes.data_ptr(),
                None if scale is None else scale.data_ptr(),
                None if offset is None else offset.data_ptr(),
                Format.F32 if scale is None else _SCALE_FORMATS[arrays.dtype_name(scale.dtype)],
                group_size,
            )
        )


_OF_BITS = {2: Format.INT2, 3: Format.INT3, 4: Format.INT4, 8: Format.INT8}
_OFFSETS = {OffsetKind.ADDITIVE: Offset.ADDITIVE, OffsetKind.ZERO_POINT: Offset.ZERO_POINT}


def kernel_group(group_size: int) -> int | None:
    """Return the group size in which the library multiplies; None if none divides."""
    return next((group for group in GROUP_SIZES if group_size % group == 0), None)


def is_centered(weight: PackedWeight, middle: int) -> bool:
    """Return True if every code is relative to the middle, so that no offset is needed."""
    if weight.offset_kind is OffsetKind.ZERO_POINT:
        return bool((weight.offset == middle).all())

    def are_centered(rows: slice) -> bool:
        return bool((weight.offset[rows].float() == weight.scale[rows].float() * -middle).all())

    return are_centered(slice(1)) and are_centered(slice(None))  # one row mostly tells


def fits_half(values: Tensor) -> bool:
    """Return True if float16 represents every value exactly."""
    is_half = arrays.dtype_name(values.dtype) == "float16"
    return is_half or bool((values.half().float() == values.float()).all())
