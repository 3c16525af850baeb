"""Experts in host memory with a torch decoder, against the decoder that has all of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.kernels.packed_weights import random_packed
from support.models.expert_models import EXPERTS
from support.models.native_models import LIBRARY
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import logits_of
from torch.nn import functional

from appliance.kernels.activation import Activation
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.routing import Router
from appliance.kernels.weights.weight import dense
from appliance.model.experts import Experts
from appliance.model.host_experts import HostExperts, HostSide
from appliance.model.layer_weights import MLPWeights
from appliance.model.layers import MLP
from appliance.model.linear import LinearPart
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from appliance.model.decoder import Decoder
    from appliance.model.source import ModelSource

DEVICE = torch.device("cpu")
SIZES = {"head_dim": 16, "hidden_size": 64}
# Biases and clamps; norms of their own and scales; a shared expert with and without a gate; groups;
# no gate; dense layers between; linears around them.
FAMILIES = {
    name: (EXPERTS | RECURRENT)[name]
    for name in (
        "gpt_oss", "gemma4", "qwen2_moe", "glm4_moe", "qwen3_moe", "nemotron_h",
        "nemotron_h-latent",
    )
}  # fmt: skip


def layers_with_experts(source: ModelSource) -> list[int]:
    return [i for i, layer in enumerate(source.spec.layers) if isinstance(layer.mlp, ExpertsSpec)]


def split(
    source: ModelSource, layers: Collection[int], dtype: torch.dtype = torch.float32
) -> Decoder:
    """Load a decoder with the experts of some layers on the host."""
    side = HostSide(NativeEngine(LIBRARY, 2), DEVICE, dtype)
    return load_decoder(source, REFERENCE, DEVICE, dtype, host=side, host_layers=layers)


@pytest.fixture(params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> Path:
    model_type, settings = FAMILIES[request.param]
    if request.param == "nemotron_h":
        settings = settings | {"num_hidden_layers": 7}
    return save(make_model(model_type, **SIZES | settings))


def test_logits_are_those_of_the_decoder_that_has_all_experts(
    folder: Path, token_ids: list[int]
) -> None:
    source = open_model(folder)
    numbers = layers_with_experts(source)
    whole = load_decoder(source, REFERENCE, DEVICE, torch.float32)
    expected = logits_of(whole, token_ids)
    for layers in (numbers, numbers[-1:]):
        decoder = split(source, layers)
        found = logits_of(decoder, token_ids)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        assert torch.equal(found.argmax(1), expected.argmax(1))
        for chunks in ([7, 1, 9, 20, 1, 1, 6], [1] * 45):
            cut = logits_of(decoder, token_ids, chunks=chunks)
            torch.testing.assert_close(cut, expected, atol=1e-4, rtol=0)


def test_each_linear_of_an_expert_reads_its_inputs_in_an_order_of_its_own() -> None:
    """GPTQ's act-order stores them like this; even gate and up of one expert may differ."""
    random = torch.Generator().manual_seed(0)

    def ordered(out_features: int, in_features: int) -> LinearPart:
        order = torch.randperm(in_features, generator=random).int()
        rows = torch.randperm(out_features, generator=random)
        weight = random_packed(out_features, in_features, 32).rows(rows)
        return LinearPart(replace(weight, input_order=order), None)

    experts = [MLPWeights([ordered(96, 64), ordered(96, 64)], ordered(64, 96)) for _ in range(4)]
    spec = ExpertsSpec(96, Activation.SILU, Router(4, 2), gated=True)
    side = HostSide(NativeEngine(LIBRARY, 2), DEVICE, torch.float32)
    hidden = torch.randn(9, 64, generator=random)
    ids = torch.rand(9, 4, generator=random).topk(2, dim=1).indices
    shares = torch.rand(9, 2, generator=random)
    found = side.lay_out(experts.__getitem__, spec).begin(hidden, ids, shares)()
    expected = torch.zeros(9, 64)
    for row, place in itertools.product(range(9), range(2)):
        expert = experts[int(ids[row, place])]
        gate, up = (dense(part.weight, torch.float32) @ hidden[row] for part in expert.gate_up)
        said = dense(expert.down.weight, torch.float32) @ (functional.silu(gate) * up)
        expected[row] += shares[row, place] * said
    assert (found - expected).norm() < 0.02 * expected.norm()  # activations are rounded to 8 bits


def test_the_device_holds_no_weight_of_them(folder: Path) -> None:
    source = open_model(folder)
    numbers = layers_with_experts(source)
    whole = load_decoder(source, REFERENCE, DEVICE, torch.float32)
    decoder = split(source, numbers[:1])
    experts = decoder.layers[numbers[0]].mlp
    assert isinstance(experts, Experts)
    assert isinstance(experts.grouped, HostExperts)
    of_layer = sum(
        4 * torch.Size(slot.shape).numel()
        for slot in source.slots()
        if slot.layer == numbers[0] and slot.expert is not None
    )
    if whole.layers[numbers[0]].mlp.experts[0].down.bias is None:  # type: ignore[union-attr]
        assert whole.weight_bytes - decoder.weight_bytes == of_layer
    assert of_layer <= experts.grouped.nbytes < 1.6 * of_layer  # tiles of 16 outputs
    assert decoder.weight_format == whole.weight_format
    assert experts.is_enqueued
    assert decoder.host_calls is experts.grouped.side.calls
    assert whole.host_calls is None


def test_the_shared_expert_runs_between_sending_rows_and_waiting_for_sums(
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_type, settings = EXPERTS["glm4_moe"]
    source = open_model(save(make_model(model_type, **SIZES | settings)))
    numbers = layers_with_experts(source)
    decoder = split(source, numbers)
    calls: list[str] = []

    def noted(kind: type, name: str, word: str) -> None:
        function = getattr(kind, name)

        def run(self: Any, *arguments: Any) -> Any:
            calls.append(word)
            return function(self, *arguments)

        monkeypatch.setattr(kind, name, run)

    noted(HostExperts, "begin", "begin")
    noted(HostExperts, "multiply", "host")
    noted(MLP, "__call__", "device")
    logits_of(decoder, token_ids)
    dense = len(source.spec.layers) - len(numbers)
    assert calls == ["device"] * dense + ["begin", "device", "host"] * len(numbers)


def test_a_capture_is_cut_where_the_host_multiplies_and_a_replay_repeats_that(
    make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    model_type, settings = EXPERTS["qwen3_moe"]
    source = open_model(save(make_model(model_type, **SIZES | settings)))
    decoder = split(source, layers_with_experts(source)[:1])
    (mlp,) = (
        layer.mlp
        for layer in decoder.layers
        if isinstance(layer.mlp, Experts) and layer.mlp.host_calls is not None
    )
    assert isinstance(mlp.grouped, HostExperts)
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 64, generator=random)
    expected = mlp(hidden)
    side, calls = mlp.grouped.side, list[Any]()
    out = side.buffer("out", (3, 64), torch.float32)
    out.fill_(torch.nan)
    with side.calls.cut_by(calls.append):
        assert mlp(hidden).isnan().all(), "nothing is multiplied while it is captured"
    (multiply,) = calls
    for _ in range(2):
        multiply()
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)
        out.fill_(torch.nan)


def test_half_precision_crosses_as_it_is_and_sums_come_back_in_float32(
    make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    model_type, settings = EXPERTS["gpt_oss"]
    source = open_model(save(make_model(model_type, **SIZES | settings)))
    whole = load_decoder(source, REFERENCE, DEVICE, torch.bfloat16)
    decoder = split(source, [1], torch.bfloat16)
    ours, theirs = decoder.layers[1].mlp, whole.layers[1].mlp
    assert isinstance(ours, Experts)
    assert isinstance(theirs, Experts)
    assert isinstance(ours.grouped, HostExperts)
    random = torch.Generator().manual_seed(3)
    for rows in (1, 2, 5, 16, 33, 64, 3, 0):
        hidden = torch.randn(rows, 64, generator=random).bfloat16()
        said, expected = ours(hidden), theirs(hidden)
        assert said.dtype == torch.bfloat16
        # torch rounds between two linears, the library does not
        torch.testing.assert_close(said, expected, atol=0.05, rtol=0.05)
