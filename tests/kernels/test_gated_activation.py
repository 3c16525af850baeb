from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.activations import QuickGELUActivation

from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU, Gating
from appliance.kernels.gated_activation import cpu, reference


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def exact(gate_up: torch.Tensor, activation: Gating) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if isinstance(activation, BoundedSwiGLU):
        limit = activation.limit
        return functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    match activation:
        case Activation.SILU:
            return functional.silu(gate) * up
        case Activation.GELU_TANH:
            return functional.gelu(gate, approximate="tanh") * up
        case Activation.RELU_SQUARED:
            return gate.relu() ** 2 * up
        case Activation.RELU:
            return gate.relu() * up
        case Activation.GELU:
            return functional.gelu(gate) * up
        case Activation.QUICK_GELU:
            return QuickGELUActivation()(gate) * up  # type: ignore[no-any-return]


GATINGS = [*Activation, ClampedSwiGLU(limit=3.0, alpha=1.7), BoundedSwiGLU(limit=2.0)]


@pytest.mark.parametrize("activation", GATINGS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("implementation", [reference, cpu], ids=["reference", "cpu"])
def test_act_of_gate_times_up(
    implementation: object, dtype: torch.dtype, rtol: float, activation: Gating
) -> None:
    gate_up = (torch.randn(7, 2 * 100) * 3).to(dtype)
    before = gate_up.clone()
    result = implementation.gated_activation(gate_up, activation)  # type: ignore[attr-defined]
    assert result.shape == (7, 100)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), exact(gate_up, activation), rtol=rtol, atol=4e-6)
    assert torch.equal(gate_up, before)
