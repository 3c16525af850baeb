"""Packed matmul on the CPU: 4-bit weights stay packed, others become bfloat16 in oneDNN's layout.

The result of a row never depends on the other rows: neither kernel changes its order of
summation with their number, save oneDNN's for a single float32 row, which is given company.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.kernels.packed_matmul.reference import dense_linear
from appliance.kernels.packed_matmul.reorder import reordered
from appliance.kernels.weight import Weight, dense

if TYPE_CHECKING:
    from appliance.kernels.backend import Linear

logger = logging.getLogger(__name__)

INT4PACK_GROUP_SIZES = (32, 64, 128, 256)
INT4PACK_ROW_MULTIPLE = 16
_INNER_K_TILES = 1  # a parameter of the GPU layout, without meaning on the CPU


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """4-bit codes expanded in registers, bfloat16 in and out, float32 sums."""

    codes: Tensor  # torch's own order, (out_features, in_features / 2) uint8
    scale_and_zero: Tensor  # (in_features / group_size, out_features, 2) bfloat16
    bias: Tensor | None  # (out_features,) bfloat16
    in_features: int
    out_features: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.codes.nbytes + self.scale_and_zero.nbytes + bias

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), both bfloat16."""
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self.codes, self.group_size, self.scale_and_zero
        )
        return out if self.bias is None else out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class PrepackedLinear:
    """A dense weight in oneDNN's blocked layout, about twice as fast as the plain one."""

    weight: Tensor  # opaque to torch, (out_features, in_features)
    bias: Tensor | None
    in_features: int
    out_features: int
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), dtype of the weight."""
        alone = x.shape[0] == 1 and x.dtype == torch.float32
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x.expand(2, -1) if alone else x, self.weight, self.bias, "none", [], ""
        )
        return out[:1] if alone else out


def prepare_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Lay a weight out for the fastest CPU kernel that takes it.

    Args:
        weight: (out_features, in_features), in any form.
        bias: (out_features,) or None.
        dtype: dtype of the activations. The 4-bit kernel is fast in bfloat16 only; float32
            and float16 use exact dense weights in that dtype.
    """
    if isinstance(weight, PackedWeight) and weight.bits == 4 and dtype == torch.bfloat16:
        if _int4pack_takes(weight):
            return reordered(_int4(weight, bias), weight.input_order)
        _log_dense_fallback(weight.shape[0] % INT4PACK_ROW_MULTIPLE, weight.group_size)
    if _can_prepack(dtype):
        return _prepacked(dense(weight, dtype), bias)
    return dense_linear(weight, bias, dtype)


def _int4pack_takes(weight: PackedWeight) -> bool:
    rows_fit = weight.shape[0] % INT4PACK_ROW_MULTIPLE == 0
    return rows_fit and weight.group_size in INT4PACK_GROUP_SIZES


def _int4(weight: PackedWeight, bias: Tensor | None) -> Int4Linear:
    out_features, in_features = weight.shape
    scale, offset = weight.scale.float(), weight.offset.float()
    # The kernel computes (q - 8) * scale + zero. Around 8 the zero is small where a group is
    # about symmetric, so rounding it to bfloat16 costs less than rounding the offset itself.
    additive = weight.offset_kind is OffsetKind.ADDITIVE
    zero = offset + 8 * scale if additive else (8 - offset) * scale
    return Int4Linear(
        codes=torch.ops.aten._convert_weight_to_int4pack_for_cpu(
            weight.unpack().to(torch.int32), _INNER_K_TILES
        ),
        scale_and_zero=torch.stack((scale.t(), zero.t()), dim=-1).to(torch.bfloat16),
        bias=None if bias is None else bias.to(torch.bfloat16),
        in_features=in_features,
        out_features=out_features,
        group_size=weight.group_size,
    )


def _can_prepack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def _prepacked(weight: Tensor, bias: Tensor | None) -> PrepackedLinear:
    bias = None if bias is None else bias.to(weight.dtype)
    return PrepackedLinear(
        weight=torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None),
        bias=bias,
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        nbytes=weight.nbytes + (0 if bias is None else bias.nbytes),
    )


@functools.cache
def _log_dense_fallback(odd_rows: int, group_size: int) -> None:
    """Once per reason, not once per layer."""
    logger.warning(
        "a 4-bit weight with groups of %d%s does not suit the packed CPU kernel: "
        "it is served as dense bfloat16, four times larger",
        group_size,
        f" and {odd_rows} rows beyond a multiple of {INT4PACK_ROW_MULTIPLE}" if odd_rows else "",
    )
