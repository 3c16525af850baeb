"""Experts streamed to a device in pieces: two CPU devices represent both sides of the bus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.kernels.packed_weights import random_packed
from support.models.expert_models import EXPERTS
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of
from torch.nn import functional

from appliance.kernels.activation import Activation
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.routing import Router
from appliance.kernels.weights.weight import dense
from appliance.model import expert_stream
from appliance.model.experts import Experts
from appliance.model.host_experts import HostExperts, HostSide
from appliance.model.layer_weights import MLPWeights
from appliance.model.linear import LinearPart
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.decoder import Decoder
    from appliance.model.source import ModelSource

DEVICE = torch.device("cpu")
SIZES = {"head_dim": 16, "hidden_size": 64}
PIECE = 1 << 16


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy across the bus."""
    found: list[int] = []
    original = expert_stream.host_bytes

    def noted(one: Any) -> torch.Tensor:
        found.append(one.nbytes)
        return original(one)

    monkeypatch.setattr(expert_stream, "host_bytes", noted)
    return found


def streaming(source: ModelSource, rows: int, piece_bytes: int = PIECE) -> Decoder:
    """Load a decoder with all experts on the host, streamed in steps of so many rows or more."""
    side = HostSide(NativeEngine(LIBRARY, 2), DEVICE, torch.float32)
    side.stream(REFERENCE, rows=rows, piece_bytes=piece_bytes)
    layers = range(len(source.spec.layers))
    numbers = [i for i in layers if isinstance(source.spec.layers[i].mlp, ExpertsSpec)]
    return load_decoder(source, REFERENCE, DEVICE, torch.float32, host=side, host_layers=numbers)


def host_experts(decoder: Decoder) -> list[HostExperts]:
    mlps = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)]
    return [mlp.grouped for mlp in mlps if isinstance(mlp.grouped, HostExperts)]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma4", "qwen2_moe", "glm4_moe", "qwen3_moe"])
def test_logits_are_those_of_the_decoder_that_has_all_experts(
    name: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
    crossed: list[int],
) -> None:
    model_type, settings = EXPERTS[name]
    source = open_model(save(make_model(model_type, **SIZES | settings)))
    whole = load_decoder(source, REFERENCE, DEVICE, torch.float32)
    expected = logits_of(whole, token_ids)
    decoder = streaming(source, rows=8)
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)
    streamed = [one for one in host_experts(decoder) if one.streamed is not None]
    of_layers = sum(one.nbytes for one in streamed)
    assert 0 < sum(crossed) <= of_layers + 2 * max(PIECE, *(one.nbytes for one in streamed))
    for chunks in ([7, 1, 9, 20, 1, 1, 6], [1] * 45):
        cut = logits_of(decoder, token_ids, chunks=chunks)
        torch.testing.assert_close(cut, expected, atol=1e-4, rtol=0)


def test_only_steps_of_so_many_rows_stream_and_the_last_layer_never(
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
    crossed: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_type, settings = EXPERTS["glm4_moe"]
    source = open_model(save(make_model(model_type, **SIZES | settings)))
    decoder = streaming(source, rows=len(token_ids))
    by_host = host_experts(decoder)
    assert [one.streamed is None for one in by_host] == [False] * (len(by_host) - 1) + [True]
    multiplied: list[int] = []
    original = HostExperts.multiply

    def noted(self: HostExperts, hidden: torch.Tensor, *others: torch.Tensor) -> None:
        multiplied.append(len(hidden))
        original(self, hidden, *others)

    monkeypatch.setattr(HostExperts, "multiply", noted)
    logits_of(decoder, token_ids, chunks=[len(token_ids) - 1, 1])
    assert not crossed
    assert len(multiplied) == 2 * len(by_host)
    multiplied.clear()
    logits_of(decoder, token_ids)
    assert crossed
    assert len(multiplied) == 1  # by the last layer


def ordered(out_features: int, in_features: int, random: torch.Generator) -> LinearPart:
    """A 4-bit weight that reads its inputs in its own order, with a bias."""
    order = torch.randperm(in_features, generator=random).int()
    rows = torch.randperm(out_features, generator=random)
    weight = random_packed(out_features, in_features, 32).rows(rows)
    return LinearPart(replace(weight, input_order=order), torch.randn(out_features))


def multiplied(x: torch.Tensor, part: LinearPart) -> torch.Tensor:
    return functional.linear(x, dense(part.weight, torch.float32), part.bias)


def test_two_buffers_hold_the_pieces_in_turn_and_each_crosses_once_a_step(
    crossed: list[int],
) -> None:
    random = torch.Generator().manual_seed(0)
    count, rows = 6, 40
    spec = ExpertsSpec(96, Activation.SILU, Router(count, 2), gated=True)
    layers = [
        [
            MLPWeights([ordered(96, 64, random), ordered(96, 64, random)], ordered(64, 96, random))
            for _ in range(count)
        ]
        for _ in range(2)
    ]
    side = HostSide(NativeEngine(LIBRARY, 2), DEVICE, torch.float32)
    side.stream(REFERENCE, rows=rows, piece_bytes=40 << 10)
    held = [side.lay_out(experts.__getitem__, spec) for experts in layers]
    pieces = [len(one.streamed.pieces) for one in held if one.streamed is not None]
    assert pieces == [2, 2]  # so the stream has four, twice its buffers
    hidden = torch.randn(rows, 64, generator=random)
    ids = torch.rand(rows, count, generator=random).topk(2, dim=1).indices
    shares = torch.rand(rows, 2, generator=random)
    for step in range(3):
        for one, experts in zip(held, layers, strict=True):
            found = one.begin(hidden, ids, shares)()
            expected = torch.zeros(rows, 64)
            for number, expert in enumerate(experts):
                gate, up = (multiplied(hidden, part) for part in expert.gate_up)
                said = multiplied(functional.silu(gate) * up, expert.down)
                share = torch.where(ids == number, shares, 0).sum(1, keepdim=True)
                expected += share * said
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
        # After each step two of the next step's pieces have already crossed.
        whole = sum(one.nbytes for one in held)
        tables = 2 * 3 * 64 * count * 3  # beside weights: three structs per expert
        assert (step + 1) * (whole - tables) <= sum(crossed) <= (step + 1.5) * whole + 4096
