"""A gated short convolution as a layer's mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.adapters.torch_slots import run_adapted

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Backend, Linear
    from appliance.model.adapters.torch_slots import LayerAdapters
    from appliance.model.recurrent_spec import ShortConvSpec
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

        `state` holds the filters' latest inputs, (num_slots, taps - 1, width) float32.
        """
        (tail,) = state
        assert step.spans is not None
        gate_in, gate_out, x = run_adapted(
            self.inputs, hidden, adapters, AdapterPlace.INTO_MIXER
        ).chunk(3, dim=-1)
        mixed = self.backend.short_conv(gate_in * x, self.filters, self.bias, tail, step.spans)
        return run_adapted(
            self.output, gate_out * mixed.to(hidden.dtype), adapters, AdapterPlace.OUT_OF_MIXER
        )
