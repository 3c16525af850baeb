"""Stacks the weights of one layer's experts for one launch; in torch only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.kernels.packed_matmul.ggml_tiles import tile_ggml
from appliance.kernels.packed_matmul.tiled import (
    TiledWeight,
    pad_bias,
    tile_fp4,
    tile_fp8,
    tile_packed,
)
from appliance.kernels.weight_codes.order import TILE_N
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import BLOCK, Fp8Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense

if TYPE_CHECKING:
    from appliance.kernels.activation import Activation, Gating
    from appliance.kernels.weights.weight import Weight

GROUP_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """The same linear of each expert, with the rows of all experts one after another.

    Attributes:
        weight: (num_experts * rows, in_features), an expert's rows padded to a multiple of TILE_N;
            where that is odd, TILE_N more rows follow, which a block of two tiles may read.
        bias: (num_experts * rows,), or None.
        out_features: rows of an expert without padding.
        order: (num_experts, in_features) int32, the input that each column of an expert's weight
            belongs to (GPTQ's act-order), or None where columns stand in the order of the inputs.
    """

    weight: Weight
    bias: Tensor | None
    out_features: int
    order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All MLPs that a layer's router chooses from.

    Attributes:
        inner: from hidden to gate and up side by side, or to up alone without a gate.
        down: back to hidden.
        activation: with a gate if `gated`.
        up: only if gate and up read their inputs in different orders; then `inner` is gate alone.
        is_part: a router also chooses experts that are elsewhere.
        weighs_inputs: the router's weights multiply what experts read, not what they say.
        in_runs: rows of gate and of up alternate in `inner`, in runs of GATE_RUN.
    """

    num_experts: int
    inner: StackedLinear
    down: StackedLinear
    activation: Activation | Gating
    gated: bool
    up: StackedLinear | None = None
    is_part: bool = False
    weighs_inputs: bool = False
    in_runs: bool = False


def laid_out(weight: Weight, dtype: torch.dtype) -> TiledWeight | Tensor | None:
    """Lay a stack out for the kernel; return None if it has no form there.

    FP8 weights keep the activations' own type. A weight that is not packed for a GPU becomes dense
    in that type, and so does every weight in float32, which is for checks.

    Raises:
        UnsupportedModelError: see `tile_fp4`.
    """
    packed = PackedWeight | Fp4Weight | Fp8Weight | GgmlWeight
    if dtype == torch.float32 or not isinstance(weight, packed):
        return dense(weight, dtype).contiguous()
    if isinstance(weight, GgmlWeight):
        assert weight.input_order is None, "a stack has an order for each expert"
        return tile_ggml(weight)
    if isinstance(weight, Fp4Weight):
        return tile_fp4(weight, dtype)
    if isinstance(weight, Fp8Weight):
        if not weight.is_finite():
            return None
        scale = weight.row_scales() if weight.is_blockwise else weight.scale
        codes = weight.codes.view(torch.uint8)
        return tile_fp8(codes, scale, BLOCK if weight.is_blockwise else 0)
    assert weight.input_order is None, "a stack has an order for each expert"
    return None if weight.group_size % GROUP_MULTIPLE else tile_packed(weight)


def padded_rows(rows: int, *, is_last: bool, multiple: int = TILE_N) -> Tensor:
    """Return the row numbers of an expert's padded weight, (padded,) int64: see `StackedLinear`.

    `multiple` is one of TILE_N; FP8 weights with scales of blocks have whole blocks.
    """
    tiles = -(-rows // multiple) * multiple // TILE_N
    index = torch.arange((tiles + (is_last and tiles % 2)) * TILE_N)
    return index.masked_fill_(index >= rows, 0)


def laid_out_bias(stacked: StackedLinear) -> Tensor | None:
    """Return (num_experts * rows,) float32, with room for the kernel's last block."""
    return pad_bias(stacked.bias)
