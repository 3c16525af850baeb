"""Gated DeltaNet as a layer's mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu, softplus

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.adapters.torch_slots import run_adapted

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.norm import Norm
    from appliance.model.recurrent_spec import GatedDeltaSpec
    from appliance.model.step import Step


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
        mixed = silu(self.backend.short_conv(mixed, self.filters, None, tail, step.spans))
        query, key, value = mixed.split([spec.keys, spec.keys, spec.values], dim=-1)
        out = self.backend.gated_delta(
            query.unflatten(-1, (-1, spec.key_dim)),
            key.unflatten(-1, (-1, spec.key_dim)),
            value.unflatten(-1, (-1, spec.value_dim)),
            -self.rates * softplus(decay.float() + self.decay_bias),
            share.float().sigmoid(),
            held,
            step.spans,
        )
        rows = out.reshape(-1, spec.value_dim)
        normed = self.norm.of(rows, self.backend)
        gated = normed.view(gate.shape) * silu(gate.float())
        return run_adapted(self.output, gated.to(hidden.dtype), adapters, AdapterPlace.OUT_OF_MIXER)

    def fresh_state(self, num_slots: int, device: torch.device) -> tuple[Tensor, ...]:
        """Allocate state slots of this layer alone."""
        return tuple(torch.empty((num_slots, *shape), device=device) for shape in self.spec.state)
