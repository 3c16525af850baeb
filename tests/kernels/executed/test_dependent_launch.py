"""On GPUs that can, kernels are launched while the one before still ends, and wait for it.

All tests of this folder that are executed for such a GPU prove the wait: the PTX machine refuses an
access before it, a thread that ends without it, and an early launch of a kernel that has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptx_machine.driver import TARGETS, PtxDriver
from support.kernels.kernel_gpu import gpu
from support.kernels.packed_weights import random_packed

from appliance.kernels.activation import Activation
from appliance.kernels.gated_activation.launch import gated_activation
from appliance.kernels.gpu.target import LEAST_DEPENDENT, starts_early
from appliance.kernels.norm_rope.launch import rms_norm
from appliance.kernels.packed_matmul.launch import prepare_linear


def test_older_gpus_and_the_interpreter_start_none_early(target: str) -> None:
    assert starts_early(torch.device("cpu")) == (TARGETS.get(target, 0) >= LEAST_DEPENDENT)


@pytest.mark.compiled
@pytest.mark.least_capability(LEAST_DEPENDENT)
def test_a_layers_kernels_wait_for_the_one_before(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: set[str] = set()
    load = PtxDriver.load_binary

    def noting(self: PtxDriver, name: str, *parts: Any) -> Any:
        found = load(self, name, *parts)
        if found[0].waits:
            waiting.add(name)
        return found

    monkeypatch.setattr(PtxDriver, "load_binary", noting)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    with gpu(TARGETS[target], has_compiled=False):
        linear = prepare_linear(random_packed(64, 128, 64), None, torch.bfloat16)
        gated_activation(linear(rms_norm(x, torch.ones(128), 1e-6)), Activation.SILU)
    assert waiting == {
        "norm_kernel",
        "group_sums_kernel",
        "packed_matmul_kernel",
        "gated_activation_kernel",
    }
