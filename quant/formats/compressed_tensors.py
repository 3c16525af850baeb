"""The compressed-tensors layout: weights of 4 or 8 bit integers in "pack-quantized" form.

A linear weight W becomes W_packed (int32 words along the inputs, low code first), W_scale,
W_shape and, where it is asymmetric, W_zero_point (words along the outputs). Codes are stored
unsigned. Layout and config schema belong to the compressed-tensors project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import CheckpointError
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.quant.formats.compressed_tensors_config import declared_schemes
from appliance.quant.formats.input_groups import regrouped
from appliance.quant.pack import (
    bytes_to_words,
    pack_zero_points,
    unpack_zero_points,
    words_to_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from appliance.checkpoint import SafetensorsFolder
    from appliance.quant.scheme import WeightScheme

PACKED, SCALE, SHAPE, ZERO_POINT = "_packed", "_scale", "_shape", "_zero_point"
G_IDX = "_g_idx"
_PARTS = (PACKED, SCALE, SHAPE, ZERO_POINT, G_IDX)
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def encode(name: str, weight: PackedWeight) -> dict[str, Tensor]:
    """The tensors that store one packed weight.

    Args:
        name: of the weight, such as model.layers.0.self_attn.q_proj.weight.
        weight: symmetric (an offset of -2 ** (bits - 1) scales) or with integer zero points.
    """
    tensors = {
        name + PACKED: bytes_to_words(weight.codes),
        name + SCALE: weight.scale.contiguous(),
        name + SHAPE: torch.tensor(weight.shape),
    }
    if weight.offset_kind is OffsetKind.ADDITIVE:
        assert torch.equal(weight.offset, -(1 << (weight.bits - 1)) * weight.scale), name
    else:
        zero_points = weight.offset.to(torch.uint8)
        tensors[name + ZERO_POINT] = pack_zero_points(zero_points, weight.bits)
    return tensors


def encoded_layout(
    name: str, shape: tuple[int, int], scheme: WeightScheme, scale_dtype: torch.dtype
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and shape of every tensor that `encode` makes of a weight, before there is one."""
    out_features, in_features = shape
    groups = in_features // (scheme.group_size or in_features)
    codes_per_word = 32 // scheme.bits
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        name + PACKED: (torch.int32, (out_features, -(-in_features // codes_per_word))),
        name + SCALE: (scale_dtype, (out_features, groups)),
        name + SHAPE: (torch.int64, (2,)),
    }
    if not scheme.symmetric:
        layout[name + ZERO_POINT] = (torch.int32, (-(-out_features // codes_per_word), groups))
    return layout


class CompressedTensorsWeights:
    """Reads a folder of pack-quantized weights, tensor by tensor.

    Args:
        folder: its config.json has a `quantization_config` of this method.

    Raises:
        UnsupportedModelError: the config asks for more than integer weights in groups or rows.
    """

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder
        self._schemes = declared_schemes(folder.config["quantization_config"])
        self._stored = frozenset(folder.tensor_names())
        packed = {
            name.removesuffix(PACKED) for name in self._stored if name.endswith("weight" + PACKED)
        }
        parts = {name + part for name in packed for part in _PARTS}
        self._packed = frozenset(packed)
        self._names = sorted(packed | (self._stored - parts))

    def tensor_names(self) -> list[str]:
        """Every tensor, a packed weight under the name it has in the unquantized model."""
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, of a packed weight the unpacked one."""
        if name not in self._packed:
            return self._folder.shape(name)
        shape = self._part(name, SHAPE).flatten().tolist()
        if len(shape) != 2 or min(shape) < 1:
            raise CheckpointError(f"{name}{SHAPE} holds {shape}, which is no shape of a matrix")
        return shape[0], shape[1]

    def packed_bits(self, name: str) -> int | None:
        """Bits of a packed weight's codes, None of a dense tensor."""
        if name not in self._packed:
            return None
        shape = self.shape(name)
        stored = self._folder.shape(name + PACKED)
        for bits in sorted({scheme.bits for scheme in self._schemes}):
            if stored == (shape[0], -(-shape[1] * bits // 32)):
                return bits
        raise CheckpointError(
            f"{name}{PACKED} has shape {stored}, which does not hold a matrix of {shape};"
            " download or quantize the model again"
        )

    def is_fp8(self, name: str) -> bool:
        """Whether a weight is stored in e4m3."""
        return name in self._stored and self._folder.dtype(name) is torch.float8_e4m3fn

    def notes(self) -> tuple[str, ...]:
        """None."""
        return ()

    def load(self, name: str) -> Tensor | PackedWeight:
        """Read one tensor; codes, scales and zero points come back as they were stored."""
        if name not in self._packed:
            return self._folder.load(name)
        shape = self.shape(name)
        tensors = {
            name + part: self._part(name, part)
            for part in (PACKED, SCALE, SHAPE, ZERO_POINT)
            if part != ZERO_POINT or name + ZERO_POINT in self._stored
        }
        weight = decode(name, (shape[0], shape[1]), tensors, self._schemes)
        if name + G_IDX in self._stored:
            return regrouped(name + G_IDX, weight, self._part(name, G_IDX))
        return weight

    def _part(self, name: str, part: str) -> Tensor:
        if name + part not in self._stored:
            raise CheckpointError(f"{name + part} is missing; download or quantize the model again")
        return self._folder.load(name + part)


def decode(
    name: str,
    shape: tuple[int, int],
    tensors: Mapping[str, Tensor],
    schemes: Sequence[WeightScheme],
) -> PackedWeight:
    """Undo `encode`.

    Args:
        name: of the weight.
        shape: (out_features, in_features).
        tensors: what is stored of this weight.
        schemes: what the config declares; one of them must explain the tensors.

    Raises:
        CheckpointError: none does, or a scale is not finite.
    """
    scale = tensors[name + SCALE]
    stored = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    for scheme in schemes:
        group_size = scheme.group_size or shape[1]
        explained = shape[1] % group_size == 0 and scale.dtype in SCALE_DTYPES
        if explained and stored == encoded_layout(name, shape, scheme, scale.dtype):
            break
    else:
        raise CheckpointError(
            f"{name}: the stored tensors do not have the types and shapes that config.json"
            f" declares ({'; '.join(map(str, schemes))}); download or quantize the model again"
        )
    if not torch.isfinite(scale).all():
        raise CheckpointError(f"{name}{SCALE} holds NaN or infinity; quantize the model again")
    if scheme.symmetric:
        offset = -scheme.zero_code * scale
    else:
        words = tensors[name + ZERO_POINT]
        offset = unpack_zero_points(words, scheme.bits, shape[0]).to(scale.dtype)
    return PackedWeight(
        codes=words_to_bytes(tensors[name + PACKED], shape[1] * scheme.bits // 8),
        scale=scale,
        offset=offset,
        offset_kind=OffsetKind.ADDITIVE if scheme.symmetric else OffsetKind.ZERO_POINT,
        bits=scheme.bits,
        group_size=group_size,
    )
