"""Launches the grouped matmul: lays out experts, chooses tiles, bounds grids."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels.activation import Activation, gate_constexprs
from appliance.kernels.gated_activation.launch import activated, gated_activation
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import target_of
from appliance.kernels.gpu.timed import TimedChoices
from appliance.kernels.grouped_matmul.kernel import (
    add_experts_kernel,
    grouped_matmul_kernel,
    lay_out_inputs_kernel,
)
from appliance.kernels.grouped_matmul.sorted_pairs import SortedPairs, sort_pairs
from appliance.kernels.grouped_matmul.variant import (
    DENSE_BLOCK_K,
    grouped_constexprs,
    without_cap,
)
from appliance.kernels.grouped_matmul.weights import laid_out, laid_out_bias
from appliance.kernels.packed_matmul.launch import launch_options
from appliance.kernels.packed_matmul.sums import group_sums
from appliance.kernels.packed_matmul.tiled import TiledWeight
from appliance.kernels.packed_matmul.tiles import architecture
from appliance.kernels.packed_matmul.variant import takes_sums
from appliance.kernels.weight_codes.order import TILE_N

if TYPE_CHECKING:
    from appliance.kernels.activation import Gating
    from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear
    from appliance.kernels.operations import ChosenExperts, Shared

ADD_BLOCK = 1024
INPUT_BLOCK = 2048
_launch_grouped = Launcher(grouped_matmul_kernel)
_launch_sum = Launcher(add_experts_kernel)
_launch_inputs = Launcher(lay_out_inputs_kernel)


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """The same linear of each expert, on the device.

    Attributes:
        weight: tiles of all experts, or a dense weight whose experts' rows are multiples of TILE_N.
        bias: float32, one per row of the tiles.
        expert_rows: of an expert with its padding.
        order: see `StackedLinear`.
        activation: of gate and up, whose rows alternate in runs; then half of the features come
            out.
    """

    weight: TiledWeight | Tensor
    bias: Tensor | None
    out_features: int
    expert_rows: int
    order: Tensor | None
    activation: Gating | None = None

    @property
    def nbytes(self) -> int:
        optional = (part.nbytes for part in (self.bias, self.order) if part is not None)
        return self.weight.nbytes + sum(optional)

    def __call__(self, x: Tensor, rows: SortedPairs) -> Tensor:
        """Multiply each pair's row by its expert's weight.

        Args:
            x: (num_tokens, in_features), or a row for each pair.

        Returns:
            (num_pairs, out_features), dtype of x; or half of them.
        """
        if self.order is not None:
            x = laid_out_inputs(x, rows.ids, order=self.order)
        if x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16:
            x = x.contiguous()
        said = self.out_features // (1 if self.activation is None else 2)
        out = x.new_empty(rows.num_pairs, said)
        weight, tile = self.weight, rows.tile
        if isinstance(weight, TiledWeight):
            stored = (weight.codes, weight.params, weight.channel_scale)
            tile = without_cap(tile, weight.kind, weight.group_size)
            blocks_k = weight.codes.shape[1] * weight.order.tile_k // weight.block_k
        else:
            stored = (weight, None, None)
            blocks_k = -(-x.shape[1] // DENSE_BLOCK_K)
        fixed = grouped_constexprs(
            weight, tile, x.shape[1], asm=not target_of(x.device).is_interpreted
        )
        grid = (len(rows.experts), -(-self.out_features // tile.block_n))
        options = {
            "SHARE": rows.num_pairs // len(x),
            **gate_constexprs(self.activation),
            **fixed,
            **launch_options(tile),
        }
        with device_of(x):
            sums = None
            if (
                isinstance(weight, TiledWeight)
                and takes_sums(weight.params_kind, tile.max_rows)
                and weight.group_size >= weight.order.tile_k  # shorter ones take products with ones
            ):
                sums = group_sums(weight, x, len(x))
            arguments = (
                out,
                x,
                rows.pairs,
                rows.experts,
                *stored,
                self.bias,
                sums,
                self.out_features,
                x.shape[1],
                x.stride(0),
                None if sums is None else sums.shape[1],
                self.expert_rows // TILE_N,
                blocks_k,
            )
            _launch_grouped(grid, arguments, options)
        return out


@dataclass(frozen=True, slots=True)
class ExpertMLPs:
    """The MLPs that a router chooses from, each down(act(gate(x)) * up(x))."""

    num_experts: int
    inner: GroupedLinear
    down: GroupedLinear
    activation: Activation | Gating
    gated: bool
    up: GroupedLinear | None = None  # see `StackedExperts`
    is_part: bool = False
    weighs_inputs: bool = False
    timed: TimedChoices = field(default_factory=TimedChoices, init=False, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights and biases take."""
        up = 0 if self.up is None else self.up.nbytes
        return self.inner.nbytes + up + self.down.nbytes

    def __call__(
        self, hidden: Tensor, choice: ChosenExperts, shared: Shared | None = None
    ) -> Tensor:
        """See `RoutedMLPs`; a graph can capture it. A choice that is not sorted is sorted here."""
        out = hidden.new_empty(len(hidden), self.down.out_features)
        if not len(hidden):
            return out
        rows = choice.pairs
        if rows is None:
            rows = sort_pairs(choice.ids, self.num_experts, self.timed)
        if self.weighs_inputs:
            hidden = laid_out_inputs(hidden, rows.ids, weights=choice.weights)
        middle = self.inner(hidden, rows)
        if self.up is not None:
            middle = torch.cat((middle, self.up(hidden, rows)), dim=1)
        if self.inner.activation is not None:
            pass  # its operation gates
        elif self.gated:
            middle = gated_activation(middle, self.activation)
        else:
            assert isinstance(self.activation, Activation)
            middle = activated(middle, self.activation)
        self._add(out, self.down(middle, rows), choice, shared)
        return out

    def _add(self, out: Tensor, said: Tensor, choice: ChosenExperts, shared: Shared | None) -> None:
        rows, gate = (None, None) if shared is None else shared
        if rows is not None:
            assert rows.shape == out.shape, (rows.shape, out.shape)
            assert rows.stride(1) == 1, rows.stride()
        width = out.shape[1]
        arguments = (
            out,
            said,
            None if self.weighs_inputs else choice.weights.contiguous(),
            choice.ids.contiguous() if self.is_part else None,
            rows,
            gate,
            width,
            self.num_experts,
            0 if rows is None else rows.stride(0),
            0 if gate is None else gate.stride(0),
        )
        options = {"TOP_K": choice.ids.shape[1], "BLOCK": ADD_BLOCK, "num_warps": 4}
        with device_of(out):
            _launch_sum((len(out), -(-width // ADD_BLOCK)), arguments, options)


def laid_out_inputs(
    x: Tensor, ids: Tensor, *, order: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Lay x out for each pair in the order of its expert's columns, or times its weight.

    Args:
        x: (num_tokens, in_features), or a row for each pair.
        ids: (num_tokens, top_k) int64, contiguous.
        order: (num_experts, in_features) int32.
        weights: (num_tokens, top_k) float32, rounded to the type of x before they multiply.

    Returns:
        (num_pairs, in_features), dtype of x.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    width = x.shape[1]
    out = x.new_empty(ids.numel(), width)
    arguments = (
        out,
        x,
        ids,
        order,
        None if weights is None else weights.contiguous(),
        width,
        x.stride(0),
        0 if order is None else len(order),
    )
    options = {"SHARE": ids.numel() // len(x), "BLOCK": INPUT_BLOCK, "num_warps": 4}
    with device_of(x):
        _launch_inputs((ids.numel(), -(-width // INPUT_BLOCK)), arguments, options)
    return out


def prepare_experts(stacked: StackedExperts, dtype: torch.dtype) -> ExpertMLPs | None:
    """Lay experts out for the GPU kernels; return None if their weights have no form there.

    Raises:
        UnsupportedModelError: no kernel covers the GPU.
    """
    prepared = [
        None if linear is None else _prepare(linear, stacked.num_experts, dtype)
        for linear in (stacked.inner, stacked.down, stacked.up)
    ]
    inner, down, up = prepared
    if inner is not None and stacked.in_runs:
        inner = replace(inner, activation=stacked.activation)
    if inner is None or down is None or (up is None and stacked.up is not None):
        return None
    where = down.weight.codes if isinstance(down.weight, TiledWeight) else down.weight
    capability = target_of(where.device).capability
    if architecture(capability) is None:
        raise UnsupportedModelError(
            f"the grouped matmul of experts has no kernel for compute capability "
            f"{capability / 10}; supported: 8.0 and above"
        )
    made = (inner, down, stacked.activation, stacked.gated, up, stacked.is_part)
    return ExpertMLPs(stacked.num_experts, *made, stacked.weighs_inputs)


def _prepare(linear: StackedLinear, num_experts: int, dtype: torch.dtype) -> GroupedLinear | None:
    weight = laid_out(linear.weight, dtype)
    if weight is None:
        return None
    # Rows behind the last expert, fewer than one of each, are no expert's.
    rows = linear.weight.shape[0] // TILE_N // num_experts * TILE_N
    bias = laid_out_bias(linear)
    return GroupedLinear(weight, bias, linear.out_features, rows, linear.order)
