"""Mamba-2 as a layer's mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, silu, softplus

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.model.norm import Norm
    from appliance.model.recurrent_spec import Mamba2Spec, SplitGroup
    from appliance.model.shard.joint import Joint
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class Mamba2:
    """The selective scan between a short convolution and a gated norm.

    Attributes:
        inputs: maps hidden to gates; values, keys and queries; steps, in this order.
        filters: (channels, taps) float32, of values, keys and queries.
        filter_bias: (channels,) float32.
        step_bias: (num_heads,) float32.
        rates: (num_heads,) float32, of the states' decay.
        skip: (num_heads,) float32, factor of values added to the output (the paper's D).
        norm: of each group's gated output; its weight is (num_heads * head_dim,).
        joint: sums what ranks have of a group's squares; needed if groups are split.
    """

    spec: Mamba2Spec
    backend: Backend
    inputs: Linear
    filters: Tensor
    filter_bias: Tensor | None
    step_bias: Tensor
    rates: Tensor
    skip: Tensor
    norm: Norm
    output: Linear
    joint: Joint | None = None

    def __call__(self, hidden: Tensor, step: Step, state: tuple[Tensor, ...]) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape; the scan runs in float32.

        `state` holds the filters' latest inputs and the scan's state, in all slots.
        """
        spec, (tail, held) = self.spec, state
        assert step.spans is not None
        gate, mixed, sizes = self.inputs(hidden).split(
            [spec.values, spec.channels, spec.num_heads], dim=-1
        )
        mixed = silu(
            self.backend.short_conv(mixed, self.filters, self.filter_bias, tail, step.spans)
        )
        value, key, query = mixed.split([spec.values, spec.keys, spec.keys], dim=-1)
        value = value.unflatten(-1, (spec.num_heads, spec.head_dim))
        read = self.backend.selective_scan(
            value,
            key.unflatten(-1, (spec.num_groups, spec.state_dim)),
            query.unflatten(-1, (spec.num_groups, spec.state_dim)),
            softplus(sizes.float() + self.step_bias),
            self.rates,
            held,
            step.spans,
        )
        out = (read + self.skip.unsqueeze(1) * value).flatten(1)
        return self.output(self._normed(out * silu(gate.float())).to(hidden.dtype))

    def _normed(self, x: Tensor) -> Tensor:
        """Norm each group of (num_tokens, num_heads * head_dim) float32."""
        groups = x.unflatten(-1, (self.spec.num_groups, -1))
        mean_square = groups.square().mean(dim=-1, keepdim=True)
        if self.spec.split is not None:
            mean_square = self._of_all_ranks(groups.square().sum(dim=-1), self.spec.split)
        normed: Tensor = groups * torch.rsqrt(mean_square + self.norm.eps)
        return normed.flatten(1) * self.norm.weight

    def _of_all_ranks(self, squares: Tensor, split: SplitGroup) -> Tensor:
        """Return the mean square of a split group from (num_tokens, 1) sums of a rank's squares."""
        assert self.joint is not None
        placed = pad(squares, (split.index, split.count - split.index - 1))
        summed = self.joint.sum(placed)[:, split.index]
        return summed.view(-1, 1, 1) / split.width

    def fresh_state(self, num_slots: int, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate state slots of this layer alone."""
        return tuple(torch.empty((num_slots, *shape), device=device) for shape in self.spec.state)
