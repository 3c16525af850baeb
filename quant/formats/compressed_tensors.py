"""The compressed-tensors layout: integers in words or bytes, FP8 as "float-quantized".

An integer weight W becomes W_packed (int32 words along the inputs, low code first), W_scale,
W_shape and, if asymmetric, W_zero_point (words along the outputs). Codes are unsigned and stored
end to end. 4-bit floats are W_packed, a byte for two, W_scale and, in NVFP4, W_global_scale, which
divides the weight. "int-quantized" keeps W, with signed codes of a byte each. An FP8 weight stays
W; W_scale has a column per output or an element per 128x128 weights. Layout and config schema
belong to the compressed-tensors project.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import BLOCK, NAN_CODE, Fp8Weight
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats.dense import DenseWeights
from appliance.quant.formats.input_groups import regrouped
from appliance.quant.formats.pack import (
    bytes_to_words,
    pack_codes,
    pack_threes,
    pack_zero_points,
    unpack_codes,
    unpack_stream,
    unpack_zero_points,
    words_to_bytes,
)
from appliance.quant.formats.scheme import Fp4Scheme, Fp8Scheme, TrellisScheme, WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from appliance.kernels.weights.weight import Weight
    from appliance.model_files.checkpoint import SafetensorsFolder
    from appliance.quant.formats.compressed_tensors_config import DeclaredWeights
    from appliance.quant.formats.scheme import LinearScheme

PACKED, SCALE, SHAPE, ZERO_POINT = "_packed", "_scale", "_shape", "_zero_point"
G_IDX, DIVISOR = "_g_idx", "_global_scale"
_PARTS = (PACKED, SCALE, SHAPE, ZERO_POINT, G_IDX)
_WEIGHT = ".weight"
INPUT_PARTS = (".input_scale", ".input_zero_point", ".input_global_scale", ".input_g_idx")
ROUNDED_INPUTS = "inputs of linears stay in 16 bits, where the checkpoint asks for 8 or 4"
SIGN = 0x80
SCALE_DTYPES = ("bfloat16", "float16", "float32")


def encode(
    name: str, weight: PackedWeight | Fp8Weight | Fp4Weight, scheme: LinearScheme
) -> dict[str, Tensor]:
    """Convert a quantized weight into its stored tensors.

    Args:
        name: such as model.layers.0.self_attn.q_proj.weight.
        weight: FP8 with bfloat16 scales; 4-bit floats; or integers, symmetric (offset of
            -2 ** (bits - 1) scales) or with integer zero points.
    """
    if isinstance(weight, Fp8Weight):
        scale = weight.scale if weight.is_blockwise else weight.scale.unsqueeze(1)
        return {name: weight.codes, name + SCALE: arrays.cast(scale, "bfloat16")}
    if isinstance(weight, Fp4Weight):
        assert isinstance(scheme, Fp4Scheme), scheme
        found = {name + PACKED: weight.codes, name + SCALE: weight.scale}
        if scheme.has_powers:
            found[name + SCALE] = arrays.viewed(weight.scale, "uint8")
        else:
            assert bool((weight.row_scale == weight.row_scale[0]).all()), "one factor for all rows"
            found[name + DIVISOR] = 1 / weight.row_scale[:1]
        return found
    assert isinstance(scheme, WeightScheme), scheme
    codes = weight.codes
    if scheme.bits == 3:
        codes = pack_threes(unpack_codes(codes, weight.bits))
    tensors = {
        name + PACKED: bytes_to_words(codes),
        name + SCALE: weight.scale.contiguous(),
        name + SHAPE: arrays.like(codes, np.array(weight.shape)),
    }
    if weight.offset_kind is OffsetKind.ADDITIVE:
        assert arrays.equal(weight.offset, -scheme.zero_code * weight.scale), name
    else:
        zero_points = arrays.cast(weight.offset, "uint8")
        tensors[name + ZERO_POINT] = pack_zero_points(zero_points, scheme.bits)
    return tensors


def encoded_layout(
    name: str, shape: tuple[int, int], scheme: LinearScheme, scale_dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor that `encode` makes."""
    out_features, in_features = shape
    if isinstance(scheme, Fp8Scheme):
        blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
        scales = blocks if scheme.blockwise else (out_features, 1)
        return {name: ("float8_e4m3fn", shape), name + SCALE: ("bfloat16", scales)}
    if isinstance(scheme, Fp4Scheme):
        kind = "uint8" if scheme.has_powers else "float8_e4m3fn"
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            name + PACKED: ("uint8", (out_features, in_features // 2)),
            name + SCALE: (kind, (out_features, in_features // scheme.group_size)),
        }
        return found if scheme.has_powers else found | {name + DIVISOR: ("float32", (1,))}
    assert not isinstance(scheme, TrellisScheme), name
    groups = in_features // (scheme.group_size or in_features)
    layout: dict[str, tuple[str, tuple[int, ...]]] = {
        name + PACKED: ("int32", (out_features, -(-in_features * scheme.bits // 32))),
        name + SCALE: (scale_dtype, (out_features, groups)),
        name + SHAPE: ("int64", (2,)),
    }
    if not scheme.symmetric:
        layout[name + ZERO_POINT] = ("int32", (-(-out_features * scheme.bits // 32), groups))
    return layout


class CompressedTensorsWeights(DenseWeights):
    """Reads integer and e4m3 weights from a folder, one tensor at a time.

    The parts of a module and their types show how it is stored: W_packed holds int32 words, W int8
    or e4m3 codes beside W_scale. Scales of inputs are left out, as inputs stay in 16 bits.

    Args:
        folder: holds the weights.
        declared: what its config says of them.
    """

    def __init__(self, folder: SafetensorsFolder, declared: DeclaredWeights) -> None:
        super().__init__(folder)
        self._schemes = declared.schemes
        self._stored = frozenset(folder.tensor_names())
        packed = {
            name.removesuffix(PACKED)
            for name in self._stored
            if name.endswith("weight" + PACKED) and folder.dtype(name) != "uint8"
        }
        scaled = {name.removesuffix(SCALE) for name in self._stored if name.endswith(SCALE)}
        whole = {name: folder.dtype(name) for name in (scaled & self._stored) - packed}
        self._packed = frozenset(packed)
        self._floats = frozenset(name for name in whole if whole[name] == "float8_e4m3fn")
        self._integers = frozenset(name for name in whole if whole[name] == "int8")
        self._plain = frozenset(whole) - self._floats - self._integers
        quantized = packed | whole.keys()
        parts = {name + part for name in quantized for part in _PARTS}
        parts |= {name.removesuffix(_WEIGHT) + part for name in quantized for part in INPUT_PARTS}
        self._names = sorted(quantized | (self._stored - parts))
        self._notes = (ROUNDED_INPUTS,) if declared.rounded_inputs else ()

    def tensor_names(self) -> list[str]:
        """List every tensor; a packed weight has its unquantized name."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, unpacked."""
        if name not in self._packed:
            return self._folder.shape(name)
        shape = self._part(name, SHAPE).reshape(-1).tolist()
        if any(type(size) is not int or size < 1 for size in shape):
            raise CheckpointError(
                f"{name}{SHAPE} holds {shape}, which is no shape of a matrix; "
                "download or quantize the model again"
            )
        return shape[0], shape[1]

    def packed_bits(self, name: str) -> int | None:
        """Return the bits of a quantized weight's codes once loaded; None for a dense tensor."""
        if name in self._floats or name in self._integers:
            return 8
        if name not in self._packed:
            return None
        shape = self.shape(name)
        stored = self._folder.shape(name + PACKED)
        for scheme in self._schemes:
            if isinstance(scheme, WeightScheme) and stored == (
                shape[0],
                -(-shape[1] * scheme.bits // 32),
            ):
                return scheme.bits  # 3 where the CPU library holds them
        raise CheckpointError(
            f"{name}{PACKED} has shape {stored}, which does not hold a matrix of {shape};"
            " download or quantize the model again"
        )

    def group_size(self, name: str) -> int | None:
        """Return the inputs that share a scale, by the shape of the scales."""
        if name not in self._integers and name not in self._packed:
            return None
        return self.shape(name)[1] // self._folder.shape(name + SCALE)[-1]

    def float_bits(self, name: str) -> int | None:
        return 8 if name in self._floats else None

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def load(self, name: str) -> Weight:
        """Read one tensor; codes, scales and zero points are not changed."""
        if name in self._floats:
            zeros = self._parts(name, (ZERO_POINT,)).values()
            if any(bool((part.float() != 0).any()) for part in zeros):
                raise UnsupportedModelError(
                    f"{name}{ZERO_POINT} is not zero: FP8 weights with zero points are not"
                    " supported; quantize the 16-bit model with appliance quantize"
                )
            return decode_fp8(
                name, self._folder.load(name), self._folder.load(name + SCALE), self._schemes
            )
        if name in self._plain:
            raise UnsupportedModelError(
                f"{name} has type {self._folder.dtype(name)} beside {name}{SCALE}: its codes were"
                " not made yet, as if it were saved in the midst of quantizing; save the model with"
                " save_compressed=True, or quantize the 16-bit model with appliance quantize"
            )
        if name in self._integers:
            parts = self._parts(name, (SCALE, ZERO_POINT))
            weight = decode_integers(name, self._folder.load(name), parts)
        elif name in self._packed:
            parts = self._parts(name, (PACKED, SCALE, SHAPE, ZERO_POINT))
            weight = decode(name, self._matrix(name), parts, self._schemes)
        else:
            return self._folder.load(name)
        if name + G_IDX in self._stored:
            return regrouped(name + G_IDX, weight, self._part(name, G_IDX))
        return weight

    def _matrix(self, name: str) -> tuple[int, int]:
        rows, columns = self.shape(name)
        return rows, columns

    def _parts(self, name: str, parts: Sequence[str]) -> dict[str, Tensor]:
        """Read the parts of a weight; zero points may be absent."""
        wanted = [part for part in parts if part != ZERO_POINT or name + part in self._stored]
        return {name + part: self._part(name, part) for part in wanted}

    def _part(self, name: str, part: str) -> Tensor:
        if name + part not in self._stored:
            raise CheckpointError(f"{name + part} is missing; download or quantize the model again")
        found = math.prod(self._folder.shape(name + part))
        if part == SHAPE and found != 2:
            raise CheckpointError(
                f"{name + part} holds {found} numbers, which is no shape of a matrix; "
                "download or quantize the model again"
            )
        return self._folder.load(name + part)


def decode(
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, Tensor],
    schemes: Sequence[LinearScheme],
) -> PackedWeight:
    """Reverse `encode` for integers.

    Args:
        shape: (out_features, in_features).
        tensors: the stored parts of this weight.
        schemes: declared by the config; one must fit the tensors.

    Raises:
        CheckpointError: no scheme fits, or a scale is not finite.
    """
    scale, zeros = tensors[name + SCALE], tensors.get(name + ZERO_POINT)
    stored = {
        key: (arrays.dtype_name(tensor.dtype), tuple(tensor.shape))
        for key, tensor in tensors.items()
    }
    if stored.get(name + SHAPE) == ("int32", (2,)):
        stored[name + SHAPE] = ("int64", (2,))
    signed = None  # zero points as versions before 0.9 stored them: a signed byte each
    if zeros is not None and stored[name + ZERO_POINT] == ("int8", tuple(scale.shape)):
        signed = zeros
        del stored[name + ZERO_POINT]
    scale_dtype = arrays.dtype_name(scale.dtype)
    for scheme in schemes:
        if not isinstance(scheme, WeightScheme):
            continue
        group_size = scheme.group_size or shape[1]
        explained = shape[1] % group_size == 0 and scale_dtype in SCALE_DTYPES
        layout = encoded_layout(name, shape, scheme, scale_dtype)
        if signed is not None:
            layout.pop(name + ZERO_POINT, None)
        if explained and stored == layout:
            break
    else:
        raise CheckpointError(
            f"{name}: the stored tensors do not have the types and shapes that config.json"
            f" declares ({'; '.join(map(str, schemes))}); download or quantize the model again"
        )
    if not arrays.is_finite(scale):
        raise CheckpointError(f"{name}{SCALE} holds NaN or infinity; quantize the model again")
    kind, offset = OffsetKind.ADDITIVE, -scheme.zero_code * scale
    if signed is not None and bool((signed != 0).any()):
        kind, offset = OffsetKind.ZERO_POINT, (signed.int() + scheme.zero_code).to(scale.dtype)
    elif zeros is not None and signed is None:
        plain = unpack_zero_points(zeros, scheme.bits, shape[0])
        kind, offset = OffsetKind.ZERO_POINT, plain.to(scale.dtype)
    codes = words_to_bytes(tensors[name + PACKED], -(-shape[1] * scheme.bits // 8))
    if scheme.bits != scheme.code_bits:
        codes = pack_codes(unpack_stream(codes, scheme.bits)[:, : shape[1]], scheme.code_bits)
    return PackedWeight(
        codes=codes,
        scale=scale,
        offset=offset,
        offset_kind=kind,
        bits=scheme.code_bits,
        group_size=group_size,
    )


def decode_integers(name: str, codes: Tensor, parts: Mapping[str, Tensor]) -> PackedWeight:
    """Build a weight from codes of a byte each.

    Args:
        codes: (out_features, in_features) int8, signed.
        parts: scales of one element, (out_features, 1) or (out_features, groups), and perhaps zero
            points of the same shape, int8.

    Raises:
        CheckpointError: shapes do not match, or a scale is not finite.
    """
    scale, zero_points = parts[name + SCALE], parts.get(name + ZERO_POINT)
    if codes.dim() != 2:
        raise CheckpointError(
            f"{name} has shape {tuple(codes.shape)}, which is no matrix; "
            "download or quantize the model again"
        )
    rows, columns = codes.shape
    if scale.numel() in (1, rows):
        scale = scale.reshape(-1, 1)
        scale = scale if len(scale) == rows else scale.expand((rows, 1)).contiguous()
    groups = scale.shape[-1] if scale.dim() == 2 and scale.shape[0] == rows else 0
    if not groups or columns % groups or arrays.dtype_name(scale.dtype) not in SCALE_DTYPES:
        raise CheckpointError(
            f"{name}{SCALE} is {scale.dtype} of shape {tuple(scale.shape)}, which does not belong"
            f" to a weight of {(rows, columns)}; download or quantize the model again"
        )
    if not arrays.is_finite(scale):
        raise CheckpointError(f"{name}{SCALE} holds NaN or infinity; quantize the model again")
    offset = -SIGN * scale
    kind = OffsetKind.ADDITIVE
    if zero_points is not None and bool((zero_points != 0).any()):
        if zero_points.numel() not in (1, scale.numel()):
            raise CheckpointError(
                f"{name}{ZERO_POINT} has shape {tuple(zero_points.shape)}, but the scales"
                f" {tuple(scale.shape)}; download or quantize the model again"
            )
        wide = zero_points.int().reshape(-1, groups if zero_points.numel() > 1 else 1) + SIGN
        offset = wide.expand(tuple(scale.shape)).to(scale.dtype).contiguous()
        kind = OffsetKind.ZERO_POINT
    return PackedWeight(
        codes=arrays.viewed(codes.contiguous(), "uint8") ^ SIGN,  # adds 128 to a signed byte
        scale=scale,
        offset=offset,
        offset_kind=kind,
        bits=8,
        group_size=columns // groups,
    )


def decode_fp8(
    name: str, codes: Tensor, scale: Tensor, schemes: Sequence[LinearScheme]
) -> Fp8Weight:
    """Reverse `encode` for FP8; also accepts one scale per tensor.

    Args:
        codes: (out_features, in_features) as stored.
        scale: (out_features, 1), (blocks, blocks) or one element.
        schemes: declared by the config, FP8 among them.

    Raises:
        CheckpointError: types or shapes do not fit, or a value is NaN or infinite.
    """
    types = [arrays.dtype_name(part.dtype) for part in (codes, scale)]
    if types[0] != "float8_e4m3fn" or codes.dim() != 2 or types[1] not in SCALE_DTYPES:
        raise CheckpointError(
            f"{name} has type {codes.dtype} and a scale of {scale.dtype}, which is not the"
            " float-quantized form; download or quantize the model again"
        )
    rows, columns = codes.shape
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    floats = {scheme.blockwise: scheme for scheme in schemes if isinstance(scheme, Fp8Scheme)}
    wide = scale.float()
    if True in floats and tuple(scale.shape) == blocks:
        scales = wide
    elif False in floats and tuple(scale.shape) in ((rows, 1), (rows,)):
        scales = wide.reshape(-1)
    elif False in floats and scale.numel() == 1:
        scales = wide.reshape(-1).expand(rows).contiguous()
    else:
        raise CheckpointError(
            f"{name}{SCALE} has shape {tuple(scale.shape)}, which does not belong to a weight of"
            f" {(rows, columns)} by config.json ({'; '.join(map(str, schemes))}); download or"
            " quantize the model again"
        )
    if not arrays.is_finite(scales):
        raise CheckpointError(f"{name}{SCALE} holds NaN or infinity; quantize the model again")
    if bool((arrays.viewed(codes, "uint8") & NAN_CODE == NAN_CODE).any()):
        raise CheckpointError(f"{name} holds NaN; quantize the model again")
    return Fp8Weight(codes, scales, floats[scales.dim() == 2].quantized_inputs)
