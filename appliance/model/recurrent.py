"""Mixers of recurrent layers: gated short convolution, Gated DeltaNet and Mamba-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, silu

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.adapters.torch_slots import run_adapted

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.norm import Norm
    from appliance.model.recurrent_spec import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, SplitGroup
    from appliance.model.shard.joint import Joint
    from appliance.model.step import Step


@dataclass(frozen=True, slots=True)
class ShortConv:
    """out(c * conv(b * x)), with b, c and x from one linear.

    Attributes:
        filters: (width, taps) float32.
        bias: (width,) float32.
    """

    spec: ShortConvSpec
    backend: Backend
    inputs: Linear  # hidden to b, c and x, in this order
    filters: Tensor
    bias: Tensor | None
    output: Linear

    def fresh_state(self, num_slots: int, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate state slots of this layer alone."""
        return tuple(torch.empty((num_slots, *shape), device=device) for shape in self.spec.state)

    def __call__(
        self,
        hidden: Tensor,
        step: Step,
        state: tuple[Tensor, ...],
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape.

        `state` holds the filters' latest inputs, (num_slots, taps - 1, width).
        """
        (tail,) = state
        assert step.spans is not None
        gate_in, gate_out, x = run_adapted(
            self.inputs, hidden, adapters, AdapterPlace.INTO_MIXER
        ).chunk(3, dim=-1)
        mixed = self.backend.short_conv(
            x, self.filters, self.bias, tail, step.spans, gates=(gate_in, gate_out)
        )
        return run_adapted(self.output, mixed, adapters, AdapterPlace.OUT_OF_MIXER)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Linear attention by the gated delta rule, between a short convolution and a gated norm.

    Attributes:
        inputs: maps hidden to queries, keys and values; gates; shares (beta); decays, in this
            order.
        filters: (channels, taps) float32, of queries, keys and values.
        rates: (num_value_heads,) float32, multiply the decays.
        decay_bias: (num_value_heads,) float32.
        norm: of each value head's output, before its gate.
    """

    spec: GatedDeltaSpec
    backend: Backend
    inputs: Linear
    filters: Tensor
    rates: Tensor
    decay_bias: Tensor
    norm: Norm
    output: Linear

    def __call__(
        self,
        hidden: Tensor,
        step: Step,
        state: tuple[Tensor, ...],
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """Map hidden (num_tokens, hidden_size) to the same shape; the rule runs in float32.

        `state` holds the filters' latest inputs and the rule's state, in all slots.
        """
        spec, (tail, held) = self.spec, state
        assert step.spans is not None
        mixed, gate, share, decay = run_adapted(
            self.inputs, hidden, adapters, AdapterPlace.INTO_MIXER
        ).split([spec.channels, spec.values, spec.num_value_heads, spec.num_value_heads], dim=-1)
        mixed = self.backend.short_conv(mixed, self.filters, None, tail, step.spans, activates=True)
        query, key, value = mixed.split([spec.keys, spec.keys, spec.values], dim=-1)
        out = self.backend.gated_delta(
            query.unflatten(-1, (-1, spec.key_dim)),
            key.unflatten(-1, (-1, spec.key_dim)),
            value.unflatten(-1, (-1, spec.value_dim)),
            decay,
            share,
            self.rates,
            self.decay_bias,
            held,
            step.spans,
        )
        gated = self.backend.gated_norm(
            out.flatten(1), gate, self.norm, hidden.dtype, width=spec.value_dim, gates_first=False
        )
        return run_adapted(self.output, gated, adapters, AdapterPlace.OUT_OF_MIXER)

    def fresh_state(self, num_slots: int, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate state slots of this layer alone."""
        return tuple(torch.empty((num_slots, *shape), device=device) for shape in self.spec.state)


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
        mixed = self.backend.short_conv(
            mixed, self.filters, self.filter_bias, tail, step.spans, activates=True
        )
        value, key, query = mixed.split([spec.values, spec.keys, spec.keys], dim=-1)
        value = value.unflatten(-1, (spec.num_heads, spec.head_dim))
        read = self.backend.selective_scan(
            value,
            key.unflatten(-1, (spec.num_groups, spec.state_dim)),
            query.unflatten(-1, (spec.num_groups, spec.state_dim)),
            sizes,
            self.rates,
            self.step_bias,
            held,
            step.spans,
        )
        skip = value, self.skip
        if spec.split is not None:
            return self.output(self._normed_with_ranks(read, skip, gate).to(hidden.dtype))
        normed = self.backend.gated_norm(
            read.flatten(1), gate, self.norm, hidden.dtype, width=spec.values // spec.num_groups,
            gates_first=True, skip=skip,
        )  # fmt: skip
        return self.output(normed)

    def _normed_with_ranks(self, read: Tensor, skip: tuple[Tensor, Tensor], gate: Tensor) -> Tensor:
        """Do what `gated_norm` does, to a group of which other ranks have other heads."""
        assert self.spec.split is not None
        value, factors = skip
        gated = (read + factors.unsqueeze(1) * value).flatten(1) * silu(gate.float())
        group = gated.unflatten(-1, (self.spec.num_groups, -1))
        mean_square = self._of_all_ranks(group.square().sum(dim=-1), self.spec.split)
        normed: Tensor = group * torch.rsqrt(mean_square + self.norm.eps)
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
