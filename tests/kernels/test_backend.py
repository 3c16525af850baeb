from __future__ import annotations

import dataclasses

import pytest
import torch

from appliance.kernels.backend import CPU, REFERENCE, select_backend
from appliance.kernels.weights.fp8 import Fp8Weight


def test_choice_follows_the_device() -> None:
    assert select_backend(torch.device("cpu"), "auto") is CPU
    assert select_backend(torch.device("cpu"), "reference") is REFERENCE
    assert select_backend(torch.device("cuda", 1), "reference") is REFERENCE


def test_cuda_gets_the_triton_launchers() -> None:
    from appliance.kernels.attention.launch import paged_attention
    from appliance.kernels.attention.timed_spans import SpanPlanner
    from appliance.kernels.kv_write.launch import write_kv

    backend = select_backend(torch.device("cuda"), "auto")
    assert backend.name == "triton"
    assert backend.write_kv is write_kv
    assert isinstance(backend.plan_attention, SpanPlanner)
    other = select_backend(torch.device("cuda"), "auto")
    assert other.plan_attention is not backend.plan_attention, "of each model"
    assert backend.paged_attention is paged_attention


def test_on_cuda_each_form_of_weight_has_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from appliance.kernels.fp8_matmul import launch as fp8_matmul
    from appliance.kernels.packed_matmul import launch as packed_matmul

    prepare_linear = select_backend(torch.device("cuda"), "auto").prepare_linear
    chosen = []
    for launcher in (fp8_matmul, packed_matmul):
        monkeypatch.setattr(launcher, "prepare_linear", lambda *_, of=launcher: chosen.append(of))
    floats = Fp8Weight(torch.zeros(4, 32).to(torch.float8_e4m3fn), torch.ones(4))
    for weight in (floats, torch.zeros(4, 32)):
        prepare_linear(weight, None, torch.bfloat16)
    assert chosen == [fp8_matmul, packed_matmul]


@pytest.mark.parametrize(("device", "choice"), [("mps", "auto"), ("cpu", "fast")])
def test_a_miss_says_what_was_given_and_what_there_is(device: str, choice: str) -> None:
    with pytest.raises(ValueError, match=f"{device}.*{choice}.*'reference'"):
        select_backend(torch.device(device), choice)


def test_tables_are_complete_and_frozen() -> None:
    for backend in (CPU, REFERENCE):
        for field in dataclasses.fields(backend):
            # Only a GPU has one operation for all experts, and rounds rows of prompts.
            is_missing = getattr(backend, field.name) is None
            assert is_missing == (field.name in ("prepare_experts", "round_prompts"))
        with pytest.raises(dataclasses.FrozenInstanceError):
            backend.name = "other"  # type: ignore[misc]
