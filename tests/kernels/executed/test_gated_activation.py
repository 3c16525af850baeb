from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers.activations import QuickGELUActivation

from appliance.errors import UnsupportedModelError
from appliance.kernels.activation import Activation, BoundedSwiGLU, ClampedSwiGLU
from appliance.kernels.gated_activation import reference
from appliance.kernels.gated_activation.launch import activated, gate_heads, gated_activation

THEIRS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    Activation.RELU_SQUARED: lambda x: functional.relu(x).square(),
    Activation.RELU: functional.relu,
    Activation.GELU: functional.gelu,
    Activation.QUICK_GELU: QuickGELUActivation(),
}
STEP = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # one rounding


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("intermediate", [1536, 1024, 40])
def test_activation_is_that_of_float64(
    intermediate: int, dtype: torch.dtype, activation: Activation
) -> None:
    x = (torch.randn(3, 2 * intermediate + 8) * 4).to(dtype)[:, : 2 * intermediate]
    gate, up = x.double().chunk(2, dim=-1)
    expected = THEIRS[activation](gate)
    for found, by in (
        (gated_activation(x, activation), up),
        (gated_activation(x[:, :intermediate], activation, x[:, intermediate:]), up),
        (activated(x[:, :intermediate], activation), torch.tensor(1.0)),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected * by, rtol=STEP[dtype], atol=4e-6)


@pytest.mark.parametrize("dtype", list(STEP))
def test_clamped_gates_are_those_of_float64(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 1032) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    gate = gate.clamp(max=3.0)
    expected = gate * torch.sigmoid(1.7 * gate) * (up.clamp(-3.0, 3.0) + 1)
    found = gated_activation(x, ClampedSwiGLU(limit=3.0, alpha=1.7))
    torch.testing.assert_close(found.double(), expected, rtol=STEP[dtype], atol=2e-6)
    broken = torch.full((1, 4), torch.nan)
    assert gated_activation(broken, ClampedSwiGLU(3.0, 1.7)).isnan().all()


@pytest.mark.parametrize("dtype", list(STEP))
def test_bounded_gates_are_those_of_float64(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 1032) * 4).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    expected = functional.silu(gate).clamp(max=2.0) * up.clamp(-2.0, 2.0)
    found = gated_activation(x, BoundedSwiGLU(limit=2.0))
    torch.testing.assert_close(found.double(), expected, rtol=STEP[dtype], atol=2e-6)
    broken = torch.full((1, 4), torch.nan)
    assert gated_activation(broken, BoundedSwiGLU(2.0)).isnan().all()


def test_gate_and_up_may_take_turns() -> None:
    gate, up = torch.randn(2, 3, 1032)
    in_turns = torch.stack((gate.view(3, -1, 8), up.view(3, -1, 8)), dim=2).flatten(1)
    found = gated_activation(in_turns, Activation.SILU, run=8)
    assert torch.equal(found, gated_activation(torch.cat((gate, up), dim=1), Activation.SILU))


@pytest.mark.parametrize("activation", Activation)
def test_large_values_saturate(activation: Activation) -> None:
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4]])
    found = gated_activation(torch.cat((gate, torch.ones(1, 4)), dim=1), activation)
    expected = torch.tensor([[0.0, 0.0, 200.0, 1e4]])
    if activation is Activation.RELU_SQUARED:
        expected = expected.square()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-30)


def test_no_rows_pass_and_what_no_kernel_covers_is_refused() -> None:
    assert gated_activation(torch.empty(0, 8), Activation.SILU).shape == (0, 4)
    with pytest.raises(UnsupportedModelError, match="float64"):
        gated_activation(torch.zeros(1, 8, dtype=torch.float64), Activation.SILU)
    assert gate_heads(torch.empty(0, 2, 8), torch.empty(0, 2, 1)).shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", list(STEP))
@pytest.mark.parametrize("of_heads", [False, True])
def test_gates_of_heads_and_of_their_elements(of_heads: bool, dtype: torch.dtype) -> None:
    heads = torch.randn(3, 5, 240).to(dtype)
    wide = (torch.randn(3, 16 + (5 if of_heads else 1200)) * 4).to(dtype)
    gates = wide[:, 16:].view(3, 5, -1)  # behind queries, keys and values
    found = gate_heads(heads, gates)
    # The reference rounds a gate, whose last bit may differ, before it multiplies.
    expected = heads.double() * gates.double().sigmoid()
    torch.testing.assert_close(found.double(), expected, rtol=2 * STEP[dtype], atol=1e-7)
    torch.testing.assert_close(
        found, reference.gate_heads(heads, gates), rtol=STEP[dtype], atol=1e-7
    )
