"""Mixture of experts: a router chooses MLPs per token; their weighted outputs are summed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from appliance.kernels.grouped_matmul.weights import StackedExperts, StackedLinear, padded_rows
from appliance.kernels.operations import ChosenExperts, Shared
from appliance.kernels.weight_codes.order import TILE_N
from appliance.kernels.weights.fp8 import BLOCK, Fp8Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.host_experts import HostExperts
from appliance.model.linear import LinearPart, stack_neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear, RoutedMLPs
    from appliance.kernels.routing import Router
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.host_experts import HostCalls
    from appliance.model.layer_weights import ExpertNorms, MLPWeights
    from appliance.model.layers import MLP
    from appliance.model.norm import Norm
    from appliance.model.shard.joint import Joint
    from appliance.model.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, and an optional shared one.

    Attributes:
        held: numbers of the experts that are here; the others' ranks add what they say.
        router_weight: (num_experts, hidden_size) float32; with `has_gate_row`, one row more.
        router_bias: (num_experts,) float32; likewise.
        selection_bias: (num_experts,) float32.
        shared_gate: (1, hidden_size) float32.
        expert_scale: (num_experts,) float32.
        grouped: all held experts as one operation, here or in host memory; if None, `experts` run
            one by one and the host waits for the router's choice.
        norms: the experts' own; see `ExpertsSpec`.
        latent: around the chosen experts; the router and the shared one read the row itself.
        weighs_inputs: see `ExpertsSpec`.
        has_gate_row: the router's last row is the gate of the shared MLP.
        joint: with `norms`, sums the ranks' parts before them; None if this is all of it.
    """

    router: Router
    held: range
    router_weight: Tensor
    router_bias: Tensor | None
    selection_bias: Tensor | None
    grouped: RoutedMLPs | HostExperts | None
    experts: tuple[MLP, ...]
    shared: MLP | None
    shared_gate: Tensor | None
    expert_scale: Tensor | None
    norms: ExpertNorms | None
    backend: Backend
    latent: LatentRows | None = None
    weighs_inputs: bool = False
    has_gate_row: bool = False
    joint: Joint | None = None

    @property
    def is_enqueued(self) -> bool:
        """True if the host waits for nothing, but in calls of its own."""
        return self.grouped is not None

    @property
    def host_calls(self) -> HostCalls | None:
        """The calls to the host, if the experts are in its memory."""
        return self.grouped.side.calls if isinstance(self.grouped, HostExperts) else None

    def __call__(
        self, hidden: Tensor, stream: Tensor, adapters: LayerAdapters | None = None
    ) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape; sums in float32.

        `hidden` is a norm of `stream`.
        """
        if self.norms is None:
            chosen, gate = self._begin_chosen(hidden, hidden)
            return chosen(self._shared(hidden, adapters, gate))
        norms = self.norms
        chosen, gate = self._begin_chosen(
            self._norm(stream, norms.router), self._norm(stream, norms.input)
        )
        shared = self._shared(hidden, adapters, gate)
        assert shared is not None
        assert shared.gate is None
        said = self._normed_sum(shared.rows, norms.shared)
        return said + self._normed_sum(chosen(None), norms.output)

    def _normed_sum(self, said: Tensor, norm: Norm) -> Tensor:
        """Norm what all ranks say."""
        return self._norm(said if self.joint is None else self.joint.sum(said), norm)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm.of(x, self.backend)

    def _begin_chosen(
        self, routed: Tensor, hidden: Tensor
    ) -> tuple[Callable[[Shared | None], Tensor], Tensor | None]:
        """Start the experts that the router chooses by `routed`.

        Experts in host memory start here; calling what is returned waits for them.

        Returns:
            A function that adds what is shared to the experts' sum, in the type of `hidden`; and
            the logits of the shared MLP's gate, if the router has its row.
        """
        logits = self.backend.router_logits(routed, self.router_weight, self.router_bias)
        gate = None
        if self.has_gate_row:
            logits, gate = logits[:, :-1], logits[:, -1:]
        choice = self.backend.route(
            logits, self.router, self.held, self.selection_bias, self.expert_scale
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
    expert: Callable[[int], MLPWeights], spec: ExpertsSpec, backend: Backend, dtype: torch.dtype
) -> RoutedMLPs | None:
    """Build all experts as one operation; None if backend or packing do not allow it."""
    if backend.prepare_experts is None:
        return None
    stacked = stack_experts([expert(number) for number in spec.experts], spec)
    return None if stacked is None else backend.prepare_experts(stacked, dtype)


def stack_experts(experts: Sequence[MLPWeights], spec: ExpertsSpec) -> StackedExperts | None:
    """Stack the weights of experts; None if their packing does not allow it."""
    inner, up = _stack([expert.gate_up for expert in experts]), None
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
    )


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
