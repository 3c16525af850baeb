"""Launches the int8 matmul for rows of prompts, where that is computed to be faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.residency import Footprints, multiprocessors_of
from appliance.kernels.gpu.target import target_of
from appliance.kernels.int8_matmul.kernel import int8_matmul_kernel, quantize_inputs_kernel
from appliance.kernels.int8_matmul.tiles import LEAST_ROWS, entry_of, int8_tile, is_faster
from appliance.kernels.int8_matmul.variant import (
    QUANTIZE_BLOCK_M,
    QUANTIZE_WARPS,
    int8_constexprs,
    multiplies,
    quantize_constexprs,
    takes_sums,
)
from appliance.kernels.packed_matmul.launch import (
    TiledLinear,
    footprint_of,
    launch_options,
    place_of,
    workspace_of,
)
from appliance.kernels.packed_matmul.tiles import ROW_STEP, TILE_N, choose_splits

if TYPE_CHECKING:
    from appliance.kernels.packed_matmul.tiled import TiledWeight

_FOOTPRINTS = Footprints(int8_matmul_kernel)
_launch_quantize = Launcher(quantize_inputs_kernel)
_launch_matmul = Launcher(int8_matmul_kernel)


@dataclass(frozen=True, slots=True)
class PromptLinear:
    """x @ weight.T + bias; rows of prompts are rounded to int8 if that is faster.

    What is faster is computed, unless it was timed, see `timed_prompts`.

    Attributes:
        linear: multiplies all other rows; its weight is multiplied here too.
        first: the row of x from which on all belong to prompts.
    """

    linear: TiledLinear
    first: int

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        return self.linear.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) bfloat16 or float16 -> (num_tokens, out_features)."""
        count = x.shape[0] - self.first
        if count < LEAST_ROWS or not self._is_faster(count, x.device):
            return self.linear(x)
        out = x.new_empty(x.shape[0], self.out_features)
        if self.first:
            out[: self.first] = self.linear(x[: self.first])
        multiply_int8(self.linear, x[self.first :], out[self.first :])
        return out

    def _is_faster(self, count: int, device: torch.device) -> bool:
        timed = self.linear.prompts.entries.get(entry_of(count))
        return self.computes_gain(count, device) if timed is None else timed.tile is not None

    def computes_gain(self, count: int, device: torch.device) -> bool:
        """Return True if so many rows of prompts are computed to be faster in int8."""
        capability = target_of(device).capability
        card = multiprocessors_of(device, capability)
        return is_faster(self.linear.form, -(-count // ROW_STEP), capability, card)


def round_prompts(linear: object, first: int) -> PromptLinear | None:
    """Return the linear that rounds rows of prompts; None if its weight has other than 4 bits.

    Args:
        linear: any.
        first: the row of x from which on all belong to prompts.
    """
    if not isinstance(linear, TiledLinear) or not multiplies(linear.weight):
        return None
    return PromptLinear(linear, first)


def multiply_int8(linear: TiledLinear, x: Tensor, out: Tensor) -> None:
    """Multiply rows, rounded to int8.

    Args:
        linear: of 4 bits, which `round_prompts` takes.
        x: (num_tokens, in_features), at least one row.
        out: (num_tokens, out_features), written.
    """
    weight, num_tokens = linear.weight, x.shape[0]
    target = target_of(x.device)
    tile = int8_tile(num_tokens)
    blocks_m = -(-num_tokens // tile.block_m)
    codes, scales, sums = quantize_inputs(weight, x, blocks_m * tile.block_m)
    blocks_k = codes.shape[1] // weight.block_k
    workspace = workspace_of(x.device)
    arguments = (
        out,
        codes,
        scales,
        sums,
        weight.codes,
        weight.params,
        linear.bias,
        workspace.partial,
        workspace.arrived,
        num_tokens,
        linear.out_features,
        scales.shape[1],
        blocks_k,
    )
    fixed = int8_constexprs(
        weight.params_kind,
        weight.group_size,
        weight.block_k,
        tile,
        activation=linear.activation,
        asm=not target.is_interpreted,
    )
    options = {**fixed, **launch_options(tile)}
    with device_of(x):
        program = footprint_of(_FOOTPRINTS, x.device, arguments, options)
        place = place_of(x.device, program)
        tiles_n, block_bytes = -(-weight.out_features // TILE_N), weight.block_k * TILE_N // 2
        splits = choose_splits(tiles_n, blocks_k, block_bytes, tile, place)
        grid = blocks_m, -(-weight.out_features // tile.block_n), splits
        _launch_matmul(grid, arguments, options)


def quantize_inputs(
    weight: TiledWeight, x: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round rows to int8 for a weight; see `reference.quantize_inputs`.

    Args:
        weight: laid out for the kernels.
        x: (num_tokens, in_features).
        columns: of the results, at least num_tokens and a multiple of 16.

    Returns:
        Codes (num_tokens, inputs of all blocks) int8 in the order of `kernel.in_order`, a scale for
        each of the weight's groups, (groups, columns) float32, and the groups' sums of codes, the
        same, or None if the weight has no offsets.
    """
    if x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16:
        x = x.contiguous()
    blocks = weight.codes.shape[1] * weight.order.tile_k // weight.block_k
    codes = x.new_empty(x.shape[0], blocks * weight.block_k, dtype=torch.int8)
    groups = codes.shape[1] // weight.group_size
    scales = x.new_empty(groups, columns, dtype=torch.float32)
    sums = torch.empty_like(scales) if takes_sums(weight.params_kind) else None
    arguments: tuple[Any, ...] = (
        codes,
        scales,
        sums,
        x,
        x.shape[0],
        weight.in_features,
        x.stride(0),
        columns,
    )
    options = {
        **quantize_constexprs(weight.group_size, weight.block_k),
        "num_warps": QUANTIZE_WARPS,
        "enable_fp_fusion": False,  # to round as the reference does
    }
    with device_of(x):
        _launch_quantize((-(-columns // QUANTIZE_BLOCK_M), blocks), arguments, options)
    return codes, scales, sums
