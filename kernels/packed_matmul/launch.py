"""Launches the packed matmul: repacks weights at load, chooses tiles and splits, sets up grids."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from appliance.errors import UnsupportedModelError
from appliance.kernels.gated_activation.launch import gated_activation
from appliance.kernels.gpu.direct_launch import Launcher, Specialization, device_of, stream_of
from appliance.kernels.gpu.residency import MOST_PROGRAMS, Footprint, Footprints, multiprocessors_of
from appliance.kernels.gpu.target import Target, early_options, starts_early, target_of
from appliance.kernels.gpu.timed import LaunchChoice, TimedChoices
from appliance.kernels.packed_matmul.ggml_tiles import tile_ggml
from appliance.kernels.packed_matmul.kernel import (
    dequantize_kernel,
    packed_matmul_kernel,
    rows_kernel,
)
from appliance.kernels.packed_matmul.reference import dense_linear
from appliance.kernels.packed_matmul.slices import (
    WIDENED_ROWS,
    LinearForm,
    best_slices,
    choose_slices,
    scratch_rows,
)
from appliance.kernels.packed_matmul.sums import group_sums
from appliance.kernels.packed_matmul.tiled import (
    GATE_RUN,
    Codes,
    TiledWeight,
    interleaved_gate_up,
    pad_bias,
    tile_fp4,
    tile_packed,
    tile_trellis,
)
from appliance.kernels.packed_matmul.tiles import (
    MAX_COUNTERS,
    ROW_STEP,
    TILE_N,
    WORKSPACE_FLOATS,
    MatmulTile,
    TileDevice,
    architecture,
    choose_splits,
    choose_tile,
    fitting_splits,
)
from appliance.kernels.packed_matmul.variant import (
    DENSE_BLOCK_M,
    LOOKUP_BLOCK_M,
    ROWS_WARPS,
    dequantize_constexprs,
    matmul_constexprs,
    may_fold,
    rows_constexprs,
    takes_sums,
    tiling_group,
)
from appliance.kernels.rotation.launch import rotated
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from appliance.kernels.activation import Gating
    from appliance.kernels.gpu.residency import Multiprocessors
    from appliance.kernels.operations import Linear
    from appliance.kernels.weights.weight import Weight

    OfAnyRows = PackedWeight | Fp4Weight | GgmlWeight
    Tileable = OfAnyRows | TrellisWeight


GROUP_MULTIPLE = 32
WIDTH_MULTIPLE = 32  # aligns every row of x to 16 bytes
DTYPES = (torch.bfloat16, torch.float16)
_FOOTPRINTS = Footprints(packed_matmul_kernel)
_launch_matmul = Launcher(packed_matmul_kernel)
_launch_dequantize = Launcher(dequantize_kernel)
_launch_rows = Launcher(rows_kernel)


@dataclass(frozen=True, slots=True)
class ReorderedLinear:
    """Calls a linear with x in the order of the weight's columns."""

    linear: Linear
    input_order: Tensor  # (in_features,) int32

    @property
    def in_features(self) -> int:
        return self.linear.in_features

    @property
    def out_features(self) -> int:
        return self.linear.out_features

    @property
    def nbytes(self) -> int:
        """Bytes that the weight, the bias and the order take."""
        return self.linear.nbytes + self.input_order.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features), dtype of x."""
        return self.linear(x.index_select(1, self.input_order))


def reordered(linear: Linear, input_order: Tensor | None) -> Linear:
    """Wrap a linear for inputs in their own order; see `PackedWeight.input_order`."""
    return linear if input_order is None else ReorderedLinear(linear, input_order)


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partial sums of a launch's splits; a stream's launches share it, one after another."""

    partial: Tensor  # (WORKSPACE_FLOATS,) float32
    arrived: Tensor  # (MAX_COUNTERS,) int32, zero between launches


@dataclass(slots=True)
class MatmulPlan:
    """All about the launches of a linear that does not change within one entry of the tiles' table.

    Attributes:
        entry: of the tiles' table.
        tile: of a program, the entry's or one that was timed.
        target: that it is for.
        specialization: of the kernel; a linear's arguments are always of the same kinds.
        options: its compile-time arguments and compiler options.
        has_sums: a kernel before the product sums x over groups.
        blocks_n: programs along the output features.
        blocks_k: blocks of inputs.
        splits: programs that share an output tile's inputs; None until the kernel is compiled.
    """

    entry: MatmulTile
    tile: MatmulTile
    target: Target
    specialization: Specialization
    options: dict[str, Any]
    has_sums: bool
    blocks_n: int
    blocks_k: int
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class TiledLinear:
    """x @ weight.T + bias with a tiled weight, and optionally act(gate) * up of the result."""

    weight: TiledWeight
    bias: Tensor | None  # (padded out_features,) float32
    activation: Gating | None  # of gate and up, in runs of GATE_RUN rows
    # By a tile's rows and x's dtype; and heights of dense slices by steps of rows and capability.
    plans: dict[tuple[int, torch.dtype], MatmulPlan] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    slices: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    timed: TimedChoices = field(default_factory=TimedChoices, init=False, compare=False, repr=False)
    # Of rows of prompts, which `int8_matmul` may multiply.
    prompts: TimedChoices = field(
        default_factory=TimedChoices, init=False, compare=False, repr=False
    )

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return self.weight.out_features // (1 if self.activation is None else 2)

    @property
    def nbytes(self) -> int:
        """Bytes that the weight and bias take."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def form(self) -> LinearForm:
        weight = self.weight
        return LinearForm(
            out_features=weight.out_features,
            in_features=weight.in_features,
            blocks_k=_blocks_k(weight),
            block_k=weight.block_k,
            nbytes=weight.nbytes,
            kind=weight.kind,
            params_kind=weight.params_kind,
            group_size=weight.group_size,
            gated=self.activation is not None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: (num_tokens, in_features) bfloat16 or float16.

        Returns:
            (num_tokens, out_features), dtype of x.
        """
        assert x.shape[1] == self.in_features, (x.shape, self.in_features)
        assert x.dtype in DTYPES, x.dtype
        weight, num_tokens = self.weight, x.shape[0]
        if weight.kind.is_trellis:
            x = rotated(x)
        elif x.stride(1) != 1 or x.stride(0) % 16 or x.data_ptr() % 16:
            x = x.contiguous()
        target = target_of(x.device)
        if num_tokens > WIDENED_ROWS:
            key = -(-num_tokens // ROW_STEP), target.capability
            heights = self.slices.get(key)
            if heights is None:
                card = multiprocessors_of(x.device, target.capability)
                heights = self.slices[key] = self._heights(*key, card)
            if heights:
                return _multiply_dense(self, x, heights)
        tile = _tile_for(num_tokens, target.capability, weight.kind, weight.group_size)
        out = x.new_empty(num_tokens, self.out_features)
        if num_tokens:
            plan = self.plans.get((tile.max_rows, x.dtype))
            if plan is None or plan.entry is not tile or plan.target is not target:
                plan = self.plans[tile.max_rows, x.dtype] = _plan(self, tile, target)
            with device_of(x):
                _multiply(self, x, out, plan)
        return out

    def use(self, timed: TimedChoices) -> None:
        """Multiply by these choices from now on; what they lack is computed."""
        self.timed.take(timed)
        self.plans.clear()
        self.slices.clear()

    def splits_for(self, rows: int) -> tuple[int, tuple[int, ...]]:
        """Return the splits for so many rows of x, and those that could be.

        Such a product has run before, with splits that were computed.
        """
        plan = next(plan for (most, _), plan in self.plans.items() if most == rows)
        assert plan.splits is not None
        return plan.splits, fitting_splits(*_split_sizes(self.weight, plan), plan.tile)

    def _heights(self, steps: int, capability: int, card: Multiprocessors) -> tuple[int, ...]:
        widened = self.timed.own_rows
        if widened is None:
            return choose_slices(self.form, steps, capability, card)
        if steps * ROW_STEP <= widened:
            return ()
        return best_slices(self.form, steps, capability, card)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Look rows up in a weight with records, exact before they are rounded.

        Args:
            ids: (num_rows,) int32 or int64.
            dtype: of the result.

        Returns:
            (num_rows, in_features).
        """
        assert self.weight.has_records, self.weight.params_kind
        out = torch.empty(len(ids), self.in_features, dtype=dtype, device=ids.device)
        if len(ids):
            _write_rows(self.weight, out, ids, 0, LOOKUP_BLOCK_M)
        return out


def prepare_linear(weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Lay a weight out for the GPU kernels; see `reference.prepare_linear`.

    A packed weight and one of GGML's blocks are repacked a few rows at a time; with float32
    activations, which are for checks, they become dense. A dense weight stays dense.

    Raises:
        UnsupportedModelError: no kernel covers the shape, the dtype or the GPU.
    """
    if dtype == torch.float32:
        return dense_linear(weight, bias, dtype)
    if not isinstance(weight, PackedWeight | Fp4Weight | GgmlWeight | TrellisWeight):
        return dense_linear(weight, bias, dtype)
    linear = TiledLinear(_tiled(weight, dtype), pad_bias(bias), activation=None)
    return reordered(linear, _order_of(weight))


def prepare_table(weight: Weight, dtype: torch.dtype) -> TiledLinear | None:
    """Lay a weight out for lookups of rows as for products; None if only GGML's types can be.

    Raises:
        UnsupportedModelError: as for `prepare_linear`.
    """
    if not isinstance(weight, GgmlWeight) or dtype == torch.float32:
        return None
    assert weight.input_order is None, "rows are looked up in the order of the inputs"
    return TiledLinear(_tiled(weight, dtype), None, activation=None)


def has_gated(weight: OfAnyRows, dtype: torch.dtype) -> bool:
    """Return True if `prepare_gate_up` accepts such a weight."""
    return _order_of(weight) is None and not weight.shape[0] % (2 * GATE_RUN) and dtype in DTYPES


def prepare_gate_up(
    weight: OfAnyRows, bias: Tensor | None, dtype: torch.dtype, activation: Gating
) -> TiledLinear:
    """Lay out one linear for act(x @ gate.T) * (x @ up.T).

    Args:
        weight: gate above up, (2 * intermediate, in_features); intermediate is a multiple of 8.
        bias: (2 * intermediate,) or None.

    Raises:
        UnsupportedModelError: as for `prepare_linear`.
    """
    _check_supported(weight, dtype)
    if weight.shape[0] % (2 * GATE_RUN):
        msg = f"gate and up of {weight.shape[0]} rows together; supported: multiples of 16"
        raise UnsupportedModelError(msg)
    assert _order_of(weight) is None, "not read here"
    rows = interleaved_gate_up(weight.shape[0]).to(_device_of(weight))
    bias = None if bias is None else bias[rows]
    return TiledLinear(_tiled(weight.rows(rows), dtype), pad_bias(bias), activation=activation)


def _tiled(weight: Tileable, dtype: torch.dtype) -> TiledWeight:
    _check_supported(weight, dtype)
    workspace_of(_device_of(weight))
    if isinstance(weight, Fp4Weight):
        return tile_fp4(weight, dtype)
    if isinstance(weight, TrellisWeight):
        return tile_trellis(weight)
    return tile_packed(weight) if isinstance(weight, PackedWeight) else tile_ggml(weight)


def _device_of(weight: Tileable) -> torch.device:
    if isinstance(weight, TrellisWeight):
        return weight.symbols.device
    return (weight.blocks if isinstance(weight, GgmlWeight) else weight.codes).device


def _order_of(weight: Tileable) -> Tensor | None:
    return None if isinstance(weight, Fp4Weight | TrellisWeight) else weight.input_order


@lru_cache(maxsize=1 << 14)
def _tile_for(rows: int, capability: int, kind: Codes, group_size: int) -> MatmulTile:
    group = tiling_group(kind, group_size)
    return choose_tile(rows, capability, group, may_fold=may_fold(kind, group_size))


def _plan(linear: TiledLinear, entry: MatmulTile, target: Target) -> MatmulPlan:
    weight, early = linear.weight, starts_early(linear.weight.codes.device)
    timed = linear.timed.entries.get(entry.max_rows, LaunchChoice())
    tile = timed.tile or entry
    asm = not target.is_interpreted
    fixed = matmul_constexprs(weight, tile, activation=linear.activation, early=early, asm=asm)
    options = {**fixed, **launch_options(tile), **early_options(early=early)}
    return MatmulPlan(
        entry,
        tile,
        target,
        _launch_matmul.specialized(options),
        options,
        has_sums=not fixed["FOLDED"] and takes_sums(weight.params_kind, tile.max_rows),
        blocks_n=-(-weight.out_features // tile.block_n),
        blocks_k=_blocks_k(weight),
        splits=timed.splits,
    )


def _multiply(linear: TiledLinear, x: Tensor, out: Tensor, plan: MatmulPlan) -> None:
    weight, num_tokens = linear.weight, x.shape[0]
    block_m = plan.tile.block_m
    blocks_m = -(-num_tokens // block_m)
    sums = group_sums(weight, x, blocks_m * block_m) if plan.has_sums else None
    workspace = workspace_of(x.device)
    arguments = (
        out,
        x,
        weight.codes,
        weight.params,
        weight.channel_scale,
        linear.bias,
        sums,
        workspace.partial,
        workspace.arrived,
        num_tokens,
        linear.out_features,
        weight.in_features,
        x.stride(0),
        0 if sums is None else sums.shape[1],
        plan.blocks_k,
    )
    splits = plan.splits or _split(weight, plan, x.device, arguments)
    plan.specialization.launch((blocks_m, plan.blocks_n, splits), arguments)


def _split(
    weight: TiledWeight, plan: MatmulPlan, device: torch.device, arguments: tuple[Any, ...]
) -> int:
    """Choose the splits, and keep them in the plan once it is known how many programs run."""
    program = footprint_of(_FOOTPRINTS, device, arguments, plan.options)
    place = place_of(device, program)
    splits = choose_splits(*_split_sizes(weight, plan), plan.tile, place)
    if program is not None or plan.target.is_interpreted:
        plan.splits = splits
    return splits


def _split_sizes(weight: TiledWeight, plan: MatmulPlan) -> tuple[int, int, int]:
    """Return tiles of output features, blocks of inputs, and bytes of a tile in one block."""
    block_bytes = weight.block_k * TILE_N * weight.kind.bits // 8
    return -(-weight.out_features // TILE_N), plan.blocks_k, block_bytes


def launch_options(tile: MatmulTile) -> dict[str, int | None]:
    """Return a tile's compiler options."""
    return {
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }


def footprint_of(
    footprints: Footprints,
    device: torch.device,
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Footprint | None:
    """Return the footprint of a launch; None where it is interpreted, or is only recorded."""
    is_interpreted = target_of(device).is_interpreted
    return None if is_interpreted else footprints.of(device, arguments, options)


def place_of(device: torch.device, program: Footprint | None) -> TileDevice:
    """Return a device and the number of programs that it runs at a time."""
    capability = target_of(device).capability
    card = multiprocessors_of(device, capability)
    return TileDevice(capability, card, card.resident(program) if program else MOST_PROGRAMS)


def _multiply_dense(linear: TiledLinear, x: Tensor, heights: tuple[int, ...]) -> Tensor:
    """Multiply by slices of the weight made dense, one after another in the same scratch."""
    weight = linear.weight
    out = x.new_empty(len(x), weight.out_features)
    scratch = x.new_empty(scratch_rows(weight.out_features, weight.in_features), weight.in_features)
    start = 0
    for height in heights:
        end = min(start + height, weight.out_features)
        dense = scratch[: end - start]
        dequantize_rows(weight, start, dense)
        part = out[:, start:end]
        if linear.bias is None:
            torch.mm(x, dense.t(), out=part)
        else:
            torch.addmm(linear.bias[start:end].to(x.dtype), x, dense.t(), out=part)
        start = end
    if linear.activation is None:
        return out
    return gated_activation(out, linear.activation, run=GATE_RUN)


def dequantize_rows(weight: TiledWeight, start: int, out: Tensor) -> None:
    """Dequantize rows from a multiple of TILE_N on into `out`, (rows, in_features)."""
    if weight.has_records:
        _write_rows(weight, out, None, start, DENSE_BLOCK_M)
        return
    blocks_k = _blocks_k(weight)
    arguments = (
        out,
        weight.codes,
        weight.params,
        weight.channel_scale,
        start // TILE_N,
        len(out),
        weight.in_features,
        blocks_k,
    )
    asm = not target_of(out.device).is_interpreted
    form = weight.kind, weight.params_kind, weight.group_size, weight.block_k
    options = {**dequantize_constexprs(*form, asm=asm), "num_warps": 4}
    with device_of(out):
        _launch_dequantize((-(-len(out) // TILE_N), blocks_k), arguments, options)


def _blocks_k(weight: TiledWeight) -> int:
    return weight.codes.shape[1] * weight.order.tile_k // weight.block_k


def _write_rows(
    weight: TiledWeight, out: Tensor, ids: Tensor | None, start: int, block_m: int
) -> None:
    """Write the rows of `ids`, or those from `start` on, in the dtype of `out`."""
    blocks_k = _blocks_k(weight)
    arguments = (
        out,
        ids,
        weight.codes,
        weight.params,
        start,
        len(out),
        weight.in_features,
        blocks_k,
    )
    form = weight.kind, weight.params_kind, weight.group_size, weight.block_k
    options = {**rows_constexprs(*form, block_m), "num_warps": ROWS_WARPS}
    with device_of(out):
        _launch_rows((-(-len(out) // block_m), blocks_k), arguments, options)


def _check_supported(weight: Tileable, dtype: torch.dtype) -> None:
    capability = target_of(_device_of(weight)).capability
    if architecture(capability) is None:
        what = f"compute capability {capability / 10}"
        supported = "8.0 and above"
    elif dtype not in DTYPES:
        what, supported = f"activation dtype {dtype}", ", ".join(map(str, DTYPES))
    elif isinstance(weight, PackedWeight) and weight.group_size % GROUP_MULTIPLE:
        what, supported = f"groups of {weight.group_size}", f"multiples of {GROUP_MULTIPLE}"
    elif weight.shape[1] % WIDTH_MULTIPLE:
        what, supported = f"{weight.shape[1]} inputs", f"multiples of {WIDTH_MULTIPLE}"
    else:
        return
    if isinstance(weight, GgmlWeight):
        kind = weight.type_name
    else:
        kind = "4-bit" if isinstance(weight, Fp4Weight) else f"{weight.bits}-bit"
    shape = f"a {kind} weight of {weight.shape[0]} x {weight.shape[1]}"
    msg = f"the packed matmul on the GPU has no kernel for {what} ({shape}); supported: {supported}"
    raise UnsupportedModelError(msg)


def workspace_of(device: torch.device) -> Workspace:
    """Return the workspace of a device's current stream, kept until the process ends."""
    return _workspace(device, stream_of(device))


@lru_cache
def _workspace(device: torch.device, stream: int) -> Workspace:
    return Workspace(
        torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device),
        torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device),
    )
