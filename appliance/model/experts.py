"""Mixture of experts: a router chooses MLPs per token; their weighted outputs are summed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear, padded_rows
from appliance.kernels.operations import ChosenExperts, RouterWeights, Shared
from appliance.kernels.packed_matmul.tiled import GATE_RUN, interleaved_gate_up
from appliance.kernels.weight_codes.order import TILE_N
from appliance.kernels.weights.fp8 import BLOCK, Fp8Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.kernels.weights.weight import column_unit, some_columns
from appliance.model.host_experts import HostExperts
from appliance.model.layer_weights import MLPWeights
from appliance.model.linear import LinearPart, stack_neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear, RoutedMLPs
    from appliance.kernels.routing import Router
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.host_experts import HostCalls
    from appliance.model.layers import MLP
    from appliance.model.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, and an optional shared one.

    Attributes:
        held: numbers of the experts that are here; the others' ranks add what they say.
        shared: None also where it is among the experts.
        shared_gate: (1, hidden_size) float32.
        grouped: all held experts as one operation, here or in host memory; if None, `experts` run
            one by one and the host waits for the router's choice.
        latent: around the chosen experts; the router and the shared one read the row itself.
        weighs_inputs: see `ExpertsSpec`.
        has_gate_row: the router's last row is the gate of the shared MLP.
        num_shared: experts, behind the router's, that are the shared MLP.
    """

    router: Router
    held: range
    router_weights: RouterWeights
    grouped: RoutedMLPs | HostExperts | None
    experts: tuple[MLP, ...]
    shared: MLP | None
    shared_gate: Tensor | None
    backend: Backend
    latent: LatentRows | None = None
    weighs_inputs: bool = False
    has_gate_row: bool = False
    num_shared: int = 0

    @property
    def is_enqueued(self) -> bool:
        """True if the host waits for nothing, but in calls of its own."""
        return self.grouped is not None

    @property
    def host_calls(self) -> HostCalls | None:
        """The calls to the host, if the experts are in its memory."""
        return self.grouped.side.calls if isinstance(self.grouped, HostExperts) else None

    def __call__(self, hidden: Tensor, adapters: LayerAdapters | None = None) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape; sums in float32."""
        chosen, gate = self._begin_chosen(hidden, hidden)
        return chosen(self._shared(hidden, adapters, gate))

    def normed_apart(
        self, hidden: Tensor, adapters: LayerAdapters | None = None
    ) -> tuple[Tensor, Tensor]:
        """Do the same with `own_norms`, which are the layer's.

        Args:
            hidden: (3, num_tokens, hidden_size): what shared MLP, router and experts read.

        Returns:
            What the chosen experts say, and what the shared MLP does.
        """
        read, routed, of_experts = hidden
        chosen, _ = self._begin_chosen(routed, of_experts)
        shared = self._shared(read, adapters, None)
        assert shared is not None
        return chosen(None), shared.rows

    def _begin_chosen(
        self, routed: Tensor, hidden: Tensor
    ) -> tuple[Callable[[Shared | None], Tensor], Tensor | None]:
        """Start the experts that the router chooses by `routed`.

        Experts in host memory start here; calling what is returned waits for them.

        Returns:
            A function that adds what is shared to the experts' sum, in the type of `hidden`; and
            the logits of the shared MLP's gate, if the router has its row.
        """
        choice, gate = self.backend.choose(
            routed,
            self.router_weights,
            self.router,
            self.held,
            shared=self.num_shared,
            has_gate=self.has_gate_row,
            timed=None if isinstance(self.grouped, HostExperts | None) else self.grouped.timed,
        )
        if self.latent is None:
            return self._begin(hidden, choice), gate
        chosen, out_of = self._begin(self.latent.into(hidden), choice), self.latent.out_of
        return lambda shared: summed(out_of(chosen(None)), shared, hidden.dtype), gate

    def _begin(self, hidden: Tensor, choice: ChosenExperts) -> Callable[[Shared | None], Tensor]:
        """Do the same for rows whose experts are chosen."""
        grouped, (ids, weights, _) = self.grouped, choice
        if isinstance(grouped, HostExperts):
            sums = grouped.begin(hidden, ids, weights)
        elif grouped is None or (self.weighs_inputs and not grouped.weighs_inputs):
            run = self._one_by_one if grouped is None else partial(_float_sums, grouped)
            if self.weighs_inputs:
                run = partial(_of_weighed, run)
            sums = partial(run, hidden, ids, weights)
        else:
            return lambda shared: grouped(hidden, choice, shared)
        return lambda shared: summed(sums(), shared, hidden.dtype)

    def _one_by_one(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in ids.unique().tolist():
            if not 0 <= expert < len(self.held):
                continue
            tokens, places = torch.where(ids == expert)
            added = self.experts[expert](hidden[tokens]).float()
            total.index_add_(0, tokens, added * weights[tokens, places, None])
        return total

    def _shared(
        self, hidden: Tensor, adapters: LayerAdapters | None, gate: Tensor | None
    ) -> Shared | None:
        if self.shared is None:
            return None
        said = self.shared(hidden, adapters)
        if self.shared_gate is not None:
            gate = linear(hidden.float(), self.shared_gate)
        return Shared(said, gate)


def summed(chosen: Tensor, shared: Shared | None, dtype: torch.dtype) -> Tensor:
    """Add what is shared to the experts' sum in float32, rounded once to `dtype`."""
    if shared is None:
        return chosen.to(dtype)
    rows = shared.rows
    return (chosen + (rows if shared.gate is None else rows * shared.gate.sigmoid())).to(dtype)


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Linears from a row to what experts read, and from their sum back."""

    into: Linear
    out_of: Linear


def _float_sums(grouped: RoutedMLPs, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return grouped(hidden, ChosenExperts(ids, weights)).float()


def _of_weighed(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Run each choice as a row of its own, multiplied by its weight."""
    rows = (hidden.unsqueeze(1) * weights.unsqueeze(-1).to(hidden.dtype)).flatten(0, 1)
    ones = torch.ones_like(weights).view(-1, 1)
    said: Tensor = run(rows, ids.reshape(-1, 1), ones).unflatten(0, ids.shape).sum(1)
    return said


def group_experts(
    expert: Callable[[int], MLPWeights],
    shared: MLPWeights | None,
    spec: ExpertsSpec,
    backend: Backend,
    dtype: torch.dtype,
) -> tuple[RoutedMLPs | None, int]:
    """Build all experts as one operation; None if backend or packing do not allow it.

    Returns:
        The operation, and how many of its last experts are the shared MLP.
    """
    if backend.prepare_experts is None:
        return None, 0
    experts = [expert(number) for number in spec.experts]
    always = []
    if shared is not None and backend.stacks_shared:
        always = as_experts(shared, spec)
    for more in (always, []) if always else ([],):
        stacked = stack_experts([*experts, *more], spec)
        grouped = None if stacked is None else backend.prepare_experts(stacked, dtype)
        if grouped is not None:
            return grouped, len(more)
    return None, 0


def as_experts(shared: MLPWeights, spec: ExpertsSpec) -> list[MLPWeights]:
    """Cut a shared MLP into experts as wide as the chosen ones; none if it is unlike them.

    The sum of what they say is what it says.
    """
    own, width = spec.shared, spec.intermediate_size
    assert own is not None
    is_like = (own.activation, own.gated, own.bias) == (spec.activation, spec.gated, spec.bias)
    apart = spec.own_norms or spec.latent is not None or spec.held is not None
    count, rest = divmod(own.intermediate_size, width)
    if not is_like or apart or rest or own.bias:
        return []
    if count == 1:
        return [shared]
    unit = column_unit(shared.down.weight)
    if unit is None or width % unit:
        return []
    cuts = [slice(start, start + width) for start in range(0, own.intermediate_size, width)]
    halves = [
        part.rows(slice(start, start + own.intermediate_size))
        for part in shared.gate_up
        for start in range(0, part.weight.shape[0], own.intermediate_size)
    ]
    return [
        MLPWeights(
            [half.rows(cut) for half in halves],
            replace(shared.down, weight=some_columns(shared.down.weight, cut.start, cut.stop)),
        )
        for cut in cuts
    ]


def stack_experts(experts: Sequence[MLPWeights], spec: ExpertsSpec) -> StackedExperts | None:
    """Stack the weights of experts; None if their packing does not allow it."""
    runs = _in_runs(experts, spec)
    inner, up = _stack([expert.gate_up for expert in experts] if runs is None else runs), None
    if inner is None and all(len(expert.gate_up) == 2 for expert in experts):
        inner, up = (_stack([[expert.gate_up[half]] for expert in experts]) for half in range(2))
        if up is None:
            return None
    down = _stack([[expert.down] for expert in experts])
    if inner is None or down is None:
        return None
    return StackedExperts(
        len(experts),
        inner,
        down,
        spec.activation,
        spec.gated,
        up,
        is_part=spec.held is not None,
        weighs_inputs=spec.weighs_inputs,
        in_runs=runs is not None,
    )


def _in_runs(experts: Sequence[MLPWeights], spec: ExpertsSpec) -> list[list[LinearPart]] | None:
    """Return gate and up with rows that alternate in runs, for one operation with the activation.

    None if their rows have no runs, or scales or codes that rows share.
    """
    if not spec.gated or spec.intermediate_size % GATE_RUN:
        return None
    found = []
    for expert in experts:
        stacked = stack_neighbours(expert.gate_up)
        if len(stacked) > 1 or isinstance(stacked[0].weight, Fp8Weight | TrellisWeight):
            return None
        (part,) = stacked
        found.append([part.rows(interleaved_gate_up(part.weight.shape[0]).to(part.device))])
    return found


def _stack(experts: Sequence[list[LinearPart]]) -> StackedLinear | None:
    linears = []
    for parts in experts:
        stacked = stack_neighbours(parts)
        if len(stacked) > 1:
            return None
        linears += stacked
    out_features = linears[0].weight.shape[0]
    last = len(linears) - 1
    order = _orders(linears)
    whole = stack_neighbours(
        [_padded(_in_stored_order(linear), i == last) for i, linear in enumerate(linears)]
    )
    if len(whole) > 1:
        return None
    return StackedLinear(whole[0].weight, whole[0].bias, out_features, order)


def _orders(linears: Sequence[LinearPart]) -> Tensor | None:
    """Return `StackedLinear.order`."""
    orders = [
        linear.weight.input_order if isinstance(linear.weight, PackedWeight) else None
        for linear in linears
    ]
    if all(order is None for order in orders):
        return None
    plain = torch.arange(linears[0].weight.shape[1], dtype=torch.int32, device=linears[0].device)
    return torch.stack([plain if order is None else order for order in orders])


def _in_stored_order(part: LinearPart) -> LinearPart:
    if not isinstance(part.weight, PackedWeight):
        return part
    return replace(part, weight=replace(part.weight, input_order=None))


def _padded(part: LinearPart, is_last: bool) -> LinearPart:
    """Repeat a row of an expert's weight until its rows fill whole tiles or blocks."""
    rows, weight = part.weight.shape[0], part.weight
    blockwise = isinstance(weight, Fp8Weight) and weight.is_blockwise
    index = padded_rows(rows, is_last=is_last, multiple=BLOCK if blockwise else TILE_N)
    if len(index) == rows:
        return part
    index = index.to(part.device)
    if not isinstance(weight, Fp8Weight):
        return part.rows(index)
    return LinearPart(weight.padded(index), None if part.bias is None else part.bias[index])
