from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed_weights import random_packed
from teacher_forcing import logits_of

from appliance.kernels.activation import Activation
from appliance.kernels.backend import REFERENCE, select_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.weight import Weight
from appliance.model.layers import GatedLinear
from appliance.model.linear import LinearPart
from appliance.model.loader import LayerBuilder, load_decoder
from appliance.model.source import open_model
from appliance.model.spec import DecoderSpec, NormSpec

NO_LAYERS = DecoderSpec("none", 64, 97, 32, (), NormSpec(1e-5), tied_head=True)
TOKEN_IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kv_format", [KVFormat.FP32, KVFormat.INT8])
def test_a_model_on_the_kernels_says_what_it_says_on_the_reference(
    tiny_llama: Path, kv_format: KVFormat
) -> None:
    found, expected = (
        logits_of(
            load_decoder(open_model(tiny_llama), backend, torch.device("cpu"), torch.float32),
            TOKEN_IDS,
            chunks=[17, 1, 21, 1],
            format=kv_format,
        )
        for backend in (select_backend(torch.device("cuda")), REFERENCE)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_gate_and_up_of_one_packing_are_one_operation_on_the_kernels() -> None:
    parts = [LinearPart(random_packed(128, 64, 32), None) for _ in range(2)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    found = {}
    for backend in (select_backend(torch.device("cuda")), REFERENCE):
        builder = LayerBuilder(backend, torch.bfloat16, NO_LAYERS)
        linear = builder.gated(parts, Activation.SILU)
        assert linear.out_features == 128
        assert builder.nbytes == linear.nbytes > 0
        assert isinstance(linear, GatedLinear) == (backend is REFERENCE)
        found[backend.name] = linear(x)
    torch.testing.assert_close(found["triton"], found["reference"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("parts", "activation"),
    [
        ([random_packed(128, 64, 32), random_packed(128, 64, 32)], Activation.GELU_TANH),
        ([random_packed(128, 64, 32), random_packed(128, 64, 64)], Activation.SILU),
        ([torch.randn(128, 64), torch.randn(128, 64)], Activation.SILU),
        ([random_packed(12, 64, 32), random_packed(12, 64, 32)], Activation.SILU),
    ],
)
def test_what_the_fused_kernel_does_not_cover_is_two_operations(
    parts: list[Weight], activation: Activation
) -> None:
    builder = LayerBuilder(select_backend(torch.device("cuda")), torch.bfloat16, NO_LAYERS)
    linear = builder.gated([LinearPart(part, None) for part in parts], activation)
    assert isinstance(linear, GatedLinear)
