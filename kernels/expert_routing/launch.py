"""Launches routing: one program chooses and sorts for the rows of a decode, many for a prompt's."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from appliance.kernels.expert_routing import reference
from appliance.kernels.expert_routing.kernel import choose_kernel, logits_kernel, route_kernel
from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.grouped_matmul.sorted_pairs import SortedPairs, sort_counted
from appliance.kernels.operations import ChosenExperts
from appliance.kernels.packed_matmul.launch import workspace_of

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.operations import RouterWeights
    from appliance.kernels.routing import Router

MULTIPLIED_ROWS = 16  # for the library are more: here each output's program reads all of them
ROWS_AT_ONCE = 4  # that a program multiplies
LOGITS_BLOCK = 1024  # of 4 warps: two 16-byte loads of the weight for each thread
LOGITS_WARPS = 4
CHOSEN_ROWS = 8  # whose experts the same launch chooses
MOST_PLACES = 1024  # experts of a row, with the padding of their groups
MOST_CHOSEN = 64  # experts of a row
PROGRAM_ELEMENTS = 8192  # places of all rows that one program routes and sorts: 16 a thread
SHARED_ELEMENTS = 2048  # places of a program's rows where there are many
FEW_ROWS = (1, 8)  # that a program is compiled for, beside as many as it can hold
MOST_ROWS = 64
MAX_WARPS = 16
WARP_ELEMENTS = 256
_launch_logits = Launcher(logits_kernel)
_launch_route = Launcher(route_kernel)
_launch_choose = Launcher(choose_kernel)


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `reference.router_logits`; with few rows one launch, which reads x in its own type."""
    num_rows, width = x.shape
    if not 0 < num_rows <= MULTIPLIED_ROWS:
        return reference.router_logits(x, weight, bias)
    assert weight.dtype == torch.float32, weight.dtype
    assert weight.is_contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    logits = torch.empty((num_rows, len(weight)), dtype=torch.float32, device=x.device)
    rows = 1 if num_rows == 1 else ROWS_AT_ONCE
    arguments = (logits, x, weight, bias, num_rows, len(weight), width, x.stride(0))
    options = {"ROWS": rows, "BLOCK": LOGITS_BLOCK, "num_warps": LOGITS_WARPS}
    with device_of(x):
        _launch_logits((len(weight), -(-num_rows // rows)), arguments, options)
    return logits


def route(
    logits: Tensor,
    router: Router,
    held: range,
    selection_bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    shared: int = 0,
    timed: TimedChoices | None = None,
) -> ChosenExperts:
    """See `reference.route`; the choice is sorted, and among equals the lowest number comes first.

    Rows that one program can hold take one launch, others two. The reference chooses where no
    program holds a row: among more than `MOST_PLACES` experts, or more than `MOST_CHOSEN` of them.

    Args:
        logits: as in the reference; rows may be longer in memory.
        gate: as in the reference, as far apart as rows of logits.
        timed: of the experts, for the blocks into which the choice is sorted.
    """
    num_rows = len(logits)
    if not num_rows or not covers(router):
        return reference.route(
            logits, router, held, selection_bias, expert_scale, gate, shared=shared
        )
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.stride(1) == 1, logits.stride()
    assert gate is None or gate.stride(0) == logits.stride(0), gate.stride()
    rows = rows_of_program(num_rows, router)
    programs = -(-num_rows // rows)
    choice, pairs = _empty(num_rows, router, held, shared, timed, logits.device)
    counts = None
    if programs > 1:
        shape = programs, len(held) + shared
        counts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    arguments = (
        choice.ids,
        choice.weights,
        counts,
        pairs.pairs if counts is None else None,
        pairs.experts if counts is None else None,
        logits,
        selection_bias,
        expert_scale,
        gate,
        num_rows,
        len(pairs.experts),
        logits.stride(0),
    )
    options = _options(router, held, rows, pairs.tile.block_m if counts is None else 0, shared)
    with device_of(logits):
        _launch_route((programs,), arguments, options)
    if counts is not None:
        sort_counted(pairs, counts)
    return choice


def choose(
    x: Tensor,
    weights: RouterWeights,
    router: Router,
    held: range,
    *,
    shared: int = 0,
    has_gate: bool = False,
    timed: TimedChoices | None = None,
) -> tuple[ChosenExperts, Tensor | None]:
    """See `reference.choose_with`; one launch for few rows, whose last program chooses."""
    num_rows = len(x)
    if not 0 < num_rows <= CHOSEN_ROWS or not covers(router):
        return _choose_apart(
            x, weights, router, held, shared=shared, has_gate=has_gate, timed=timed
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    assert weights.weight.dtype == torch.float32, weights.weight.dtype
    assert weights.weight.is_contiguous()
    outputs, device = len(weights.weight), x.device
    logits = torch.empty((num_rows, outputs), dtype=torch.float32, device=device)
    choice, pairs = _empty(num_rows, router, held, shared, timed, device)
    gate = logits[:, -1:] if has_gate else None
    multiplied = 1 if num_rows == 1 else ROWS_AT_ONCE
    arguments = (
        choice.ids,
        choice.weights,
        None,
        pairs.pairs,
        pairs.experts,
        logits,
        weights.selection_bias,
        weights.expert_scale,
        gate if shared else None,
        x,
        weights.weight,
        weights.bias,
        workspace_of(device).arrived,
        num_rows,
        len(pairs.experts),
        outputs,
        x.shape[1],
        x.stride(0),
    )
    rows = rows_of_program(num_rows, router)
    options = {
        "MULTIPLIED": multiplied,
        "BLOCK": LOGITS_BLOCK,
        **constexprs(router, held, rows, pairs.tile.block_m, shared),
        "num_warps": LOGITS_WARPS,
    }
    with device_of(x):
        _launch_choose((outputs, -(-num_rows // multiplied)), arguments, options)
    return choice, None if shared else gate


def _empty(
    num_rows: int,
    router: Router,
    held: range,
    shared: int,
    timed: TimedChoices | None,
    device: torch.device,
) -> tuple[ChosenExperts, SortedPairs]:
    """Take memory for a choice, and for the same sorted."""
    assert not shared or len(held) == router.num_experts, "ranks have parts of a shared MLP"
    shape = num_rows, router.top_k + shared
    ids = torch.empty(shape, dtype=torch.int64, device=device)
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    pairs = SortedPairs.empty(ids, len(held) + shared, timed)
    return ChosenExperts(ids, weights, pairs), pairs


@cache
def _options(router: Router, held: range, rows: int, block_m: int, shared: int) -> dict[str, Any]:
    fixed = constexprs(router, held, rows, block_m, shared)
    return {**fixed, "num_warps": num_warps(fixed)}


class RouteConstexprs(TypedDict):
    """The compile-time arguments of `route_kernel`."""

    NUM_EXPERTS: int
    TOP_K: int
    SCORING: str
    RENORMALIZE: bool
    EPSILON: float
    SCALE: float
    NUM_GROUPS: int
    TOP_GROUPS: int
    BEST_OF_GROUP: int
    FIRST: int
    NUM_HERE: int
    SHARED: int
    BLOCK_M: int
    ROWS: int
    GROUPS: int
    GROUP: int
    SLOTS: int


def covers(router: Router) -> bool:
    """Return True if the kernel holds a row of this router."""
    return places(router) <= MOST_PLACES and router.top_k <= MOST_CHOSEN


def places(router: Router) -> int:
    """Return the elements of a row: experts, with groups padded to powers of two."""
    groups, group = _padded_groups(router)
    return groups * group


def rows_of_program(num_rows: int, router: Router) -> int:
    """Return the rows of a program, a power of two."""
    row = places(router)
    for rows in (*FEW_ROWS, min(MOST_ROWS, PROGRAM_ELEMENTS // row)):
        if num_rows <= rows:
            return rows
    return max(1, SHARED_ELEMENTS // row)


def constexprs(
    router: Router, held: range, rows: int, block_m: int, shared: int = 0
) -> RouteConstexprs:
    """Return the compile-time arguments of `route_kernel`; `block_m` is 0 if it does not sort."""
    groups, group = _padded_groups(router)
    return {
        "NUM_EXPERTS": router.num_experts,
        "TOP_K": router.top_k,
        "SCORING": router.scoring.value,
        "RENORMALIZE": router.renormalize,
        "EPSILON": router.epsilon,
        "SCALE": router.scale,
        "NUM_GROUPS": router.num_groups,
        "TOP_GROUPS": router.top_groups,
        "BEST_OF_GROUP": router.best_of_group,
        "FIRST": held.start,
        "NUM_HERE": len(held),
        "SHARED": shared,
        "BLOCK_M": block_m,
        "ROWS": rows,
        "GROUPS": groups,
        "GROUP": group,
        "SLOTS": _power_of_two(router.top_k),
    }


def num_warps(fixed: RouteConstexprs) -> int:
    elements = fixed["ROWS"] * fixed["GROUPS"] * fixed["GROUP"]
    return min(MAX_WARPS, max(1, elements // WARP_ELEMENTS))


def _padded_groups(router: Router) -> tuple[int, int]:
    """Return groups, and experts of a group, both rounded up to powers of two."""
    of_group = router.num_experts // router.num_groups
    return _power_of_two(router.num_groups), _power_of_two(of_group)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


_choose_apart = reference.choose_with(router_logits, route)
