"""Experts of transformers' modules that declare their form to its experts interface.

A checkpoint holds them in one tensor, as the modules do, or each expert's matrices apart.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from appliance.errors import UnsupportedModelError
from appliance.model.tensors import Role, TensorSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from torch import Tensor

    from appliance.kernels.operations import Linear

IMPLEMENTATION = "appliance"
GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
_GATE_UP = "gate_up_proj"


@cache
def register() -> None:
    """Make our implementation known to transformers; it runs in models without weights alone."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run_without_weights)


def _run_without_weights(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    return torch.empty_like(hidden_states)


def has_experts(module: nn.Module) -> bool:
    """Return True for a module that declares its form to the experts interface."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed")


def are_apart(name: str, stored: Set[str]) -> bool:
    """Return True if a checkpoint holds each expert's matrices apart."""
    return f"{name}.0.{DOWN}.weight" in stored


def expert_slots(name: str, module: Any, layer: int | None) -> list[TensorSlot]:
    """List the matrices of experts that a checkpoint holds apart.

    Raises:
        UnsupportedModelError: they have biases, norms or another form.
    """
    for setting in ("has_bias", "is_transposed", "has_post_expert_norm"):
        if getattr(module, setting, False):
            raise UnsupportedModelError(f"{name} has experts with {setting}, each stored apart")
    count, hidden, middle = module.down_proj.shape
    parts = (*((GATE,) if module.has_gate else ()), UP)
    return [
        TensorSlot(f"{name}.{expert}.{part}.weight", shape, Role.UP, layer, expert)
        for expert in range(count)
        for part, shape in (*((part, (middle, hidden)) for part in parts), (DOWN, (hidden, middle)))
    ]


def stacked_parts(module: Any) -> tuple[str, str]:
    """Name the tensors of all experts in a module: into the middle, and out of it.

    Raises:
        UnsupportedModelError: norms follow each expert.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise UnsupportedModelError(f"{type(module).__name__} norms what each expert says")
    return (_GATE_UP if module.has_gate else UP), DOWN


class LaidOutExperts(nn.Module):
    """Experts in the engine's layout, each as two linears.

    Args:
        inputs: of each expert, hidden size to gate and up, or to up alone.
        outputs: of each expert, to the hidden size.
        activate: what lies between them.
    """

    def __init__(
        self,
        inputs: list[Linear],
        outputs: list[Linear],
        activate: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.activate = activate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum what each row's experts say, weighted: (num_rows, hidden_size) like its input."""
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.inputs):
                continue  # stands for none
            rows, places = (top_k_index == expert).nonzero(as_tuple=True)
            said = self.outputs[expert](
                self.activate(self.inputs[expert](hidden_states[rows])).to(hidden_states.dtype)
            )
            weights = top_k_weights[rows, places].unsqueeze(-1)
            total.index_add_(0, rows, (said * weights).to(total.dtype))
        return total
