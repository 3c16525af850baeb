"""Models that others quantized: every executor computes what the dense weights give."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoint_forms import DEVICE, FORMS, SHAPES, Form, write_both
from support.models.teacher_forcing import logits_of
from transformers import AutoConfig, AutoModelForCausalLM

from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.attention import Attention
from appliance.model.layers import MLP, GatedLinear
from appliance.model.linear import ConcatenatedLinear
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.size import estimate_native_bytes, estimate_weight_bytes


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def test_logits_are_those_of_the_dense_weights(
    form: Form, tmp_path: Path, token_ids: list[int]
) -> None:
    quantized, dense = write_both(tmp_path, form)
    expected = logits_of(load_decoder(dense, REFERENCE, DEVICE, torch.float32), token_ids)
    assert expected.std() > 0.5  # the logits vary
    theirs: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(dense.path))
    assert quantized.num_parameters() == theirs.num_parameters()
    decoder = load_decoder(quantized, REFERENCE, DEVICE, torch.float32)
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)
    assert decoder.weight_format == f"{form.weight_format}, head fp32"
    native = load_native(quantized, NativeEngine(load_library(), 2), torch.float32)
    found = logits_of(native, token_ids)
    share = float((found - expected).norm() / expected.norm())
    assert share < (
        1e-5 if form.weight_format == "fp8 (held as fp32)" else 0.04
    )  # activations are rounded to 8 bits
    assert native.weight_bytes <= estimate_native_bytes(quantized, torch.float32) * 1.05
    held = load_decoder(quantized, CPU, DEVICE, torch.bfloat16)
    assert held.weight_bytes <= estimate_weight_bytes(quantized, DEVICE, torch.bfloat16) * 1.05
    share = float((logits_of(held, token_ids) - expected).norm() / expected.norm())
    assert share < 0.05


@pytest.mark.parametrize(("form", "bits"), [("3-bit", 3), ("2-bit", 2)])
def test_the_library_holds_few_bits_in_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, bits: int
) -> None:
    source, _ = write_both(tmp_path, FORMS[form])
    engine = NativeEngine(load_library(), 1)
    few = load_native(source, engine, torch.float32)
    assert few.weight_format.startswith(f"{bits} bits (groups of ")
    monkeypatch.setattr(PackedWeight, "least_bits", property(lambda weight: weight.bits))
    four = load_native(source, engine, torch.float32)
    weights = sum(math.prod(slot.shape) for slot in source.slots() if slot.is_linear)
    # Zero points that are all in the middle take no memory either.
    saved = weights * {3: 1 / 8, 2: 2 / 8 + 2 / 32}[bits]
    assert four.weight_bytes - few.weight_bytes == pytest.approx(saved, rel=0.01)


def test_orders_of_their_own_stand_side_by_side(tmp_path: Path) -> None:
    source, _ = write_both(tmp_path, FORMS["act-order"])
    decoder = load_decoder(source, REFERENCE, DEVICE, torch.float32)
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, Attention)
    qkv = mixer.qkv
    assert isinstance(qkv, ConcatenatedLinear)
    assert [part.out_features for part in qkv.parts] == [192, 64]  # the value has another order
    mlp = decoder.layers[0].mlp
    assert isinstance(mlp, MLP)
    gated = mlp.middle
    assert isinstance(gated, GatedLinear)
    assert not isinstance(gated.gate_up, ConcatenatedLinear)
    weight = source.weights.load("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, PackedWeight)
    assert weight.input_order is not None


def test_a_gpu_holds_fp8_weights_in_a_byte_each(tmp_path: Path) -> None:
    source, dense = write_both(tmp_path, FORMS["fp8"])
    gpu = torch.device("cuda")
    saved = estimate_weight_bytes(dense, gpu, torch.bfloat16)
    saved -= estimate_weight_bytes(source, gpu, torch.bfloat16)
    linears = 2 * sum(rows * columns for rows, columns in SHAPES.values())
    assert 0.95 * linears < saved < linears
    assert estimate_weight_bytes(source, gpu, torch.float32) == estimate_weight_bytes(
        dense, gpu, torch.float32
    )
