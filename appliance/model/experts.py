"""Mixture of experts: a router chooses MLPs per token; their weighted outputs are summed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from appliance.kernels.expert_routing.reference import route
from appliance.model.host_experts import HostExperts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear, RoutedMLPs
    from appliance.kernels.routing import Router
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.host_calls import HostCalls
    from appliance.model.layer_weights import ExpertNorms
    from appliance.model.layers import MLP
    from appliance.model.norm import Norm
    from appliance.model.shard.joint import Joint


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Linears from a row to what experts read, and from their sum back."""

    into: Linear
    out_of: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, and an optional shared one.

    Attributes:
        held: numbers of the experts that are here; the others' ranks add what they say.
        router_weight: (num_experts, hidden_size) float32.
        router_bias: (num_experts,) float32.
        selection_bias: (num_experts,) float32.
        shared_gate: (1, hidden_size) float32.
        expert_scale: (num_experts,) float32.
        grouped: all held experts as one operation, here or in host memory; if None, `experts` run
            one by one and the host waits for the router's choice.
        norms: the experts' own; see `ExpertsSpec`.
        latent: around the chosen experts; the router and the shared one read the row itself.
        weighs_inputs: see `ExpertsSpec`.
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
            chosen = self._begin_chosen(hidden, hidden)
            shared = self._shared(hidden, adapters)
            return (chosen() + shared).to(hidden.dtype)
        norms = self.norms
        chosen = self._begin_chosen(
            self._norm(stream, norms.router), self._norm(stream, norms.input)
        )
        shared = self._normed_sum(self._shared(hidden, adapters).to(hidden.dtype), norms.shared)
        return shared + self._normed_sum(chosen().to(hidden.dtype), norms.output)

    def _normed_sum(self, said: Tensor, norm: Norm) -> Tensor:
        """Norm what all ranks say."""
        return self._norm(said if self.joint is None else self.joint.sum(said), norm)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm.of(x, self.backend)

    def _begin_chosen(self, routed: Tensor, hidden: Tensor) -> Callable[[], Tensor]:
        """Start the experts that the router chooses by `routed`; return their float32 sum's getter.

        Experts in host memory start here; calling the result waits for them.
        """
        logits = linear(routed.float(), self.router_weight, self.router_bias)
        ids, weights = route(logits, self.router, self.selection_bias, self.expert_scale)
        if self.held.start:
            ids = ids - self.held.start
        if self.latent is None:
            return self._begin(hidden, ids, weights)
        chosen, out_of = self._begin(self.latent.into(hidden), ids, weights), self.latent.out_of
        return lambda: out_of(chosen().to(hidden.dtype)).float()

    def _begin(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor]:
        """Do the same for rows whose experts are chosen."""
        if isinstance(self.grouped, HostExperts):
            return self.grouped.begin(hidden, ids, weights)
        run = self._one_by_one if self.grouped is None else self.grouped
        if self.weighs_inputs:
            return partial(_of_weighed, run, hidden, ids, weights)
        return partial(run, hidden, ids, weights)

    def _one_by_one(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for expert in ids.unique().tolist():
            if not 0 <= expert < len(self.held):
                continue
            tokens, places = torch.where(ids == expert)
            added = self.experts[expert](hidden[tokens]).float()
            total.index_add_(0, tokens, added * weights[tokens, places, None])
        return total

    def _shared(self, hidden: Tensor, adapters: LayerAdapters | None) -> Tensor:
        if self.shared is None:
            return torch.zeros_like(hidden, dtype=torch.float32)
        said = self.shared(hidden, adapters).float()
        if self.shared_gate is None:
            return said
        return said * linear(hidden.float(), self.shared_gate).sigmoid()


def _of_weighed(
    run: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """Run each choice as a row of its own, multiplied by its weight."""
    rows = (hidden.unsqueeze(1) * weights.unsqueeze(-1).to(hidden.dtype)).flatten(0, 1)
    ones = torch.ones_like(weights).view(-1, 1)
    said: Tensor = run(rows, ids.reshape(-1, 1), ones).unflatten(0, ids.shape).sum(1)
    return said
