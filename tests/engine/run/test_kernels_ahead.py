"""The layers of a model that represent all others when its kernels are compiled ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from appliance.engine.run.kernels_ahead import distinct_layers, with_layers
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.decoder import Decoder
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec

INT8, BF16 = LayerPrecision(KVFormat.INT8), LayerPrecision(KVFormat.BF16)


def deep(model: Path, copies: int) -> Decoder:
    """A model whose layers repeat so many times."""
    decoder = load_decoder(open_model(model), REFERENCE, torch.device("cpu"), torch.float32)
    spec = replace(decoder.spec, layers=decoder.spec.layers * copies)
    return replace(decoder, spec=spec, layers=decoder.layers * copies)


def test_layers_of_one_kind_are_compiled_for_once_and_for_the_last(tiny_llama: Path) -> None:
    model = deep(tiny_llama, 3)
    assert distinct_layers(model, [INT8] * 6) == [0, 5]
    scales = [replace(INT8, head_scales=torch.rand(2, 2)) for _ in range(6)]
    assert distinct_layers(model, scales) == [0, 5]


def test_layers_that_differ_are_all_kept(tiny_llama: Path) -> None:
    model = deep(tiny_llama, 3)
    assert distinct_layers(model, [INT8, INT8, BF16, BF16, INT8, INT8]) == [0, 2, 5]
    norm = model.layers[1].mlp_norm
    assert norm is not None
    other = replace(model.layers[1], mlp_norm=replace(norm, weight=norm.weight.double()))
    mixed = replace(model, layers=(model.layers[0], other, *model.layers[2:]))
    assert distinct_layers(mixed, [INT8] * 6) == [0, 1, 5]


def test_layers_that_read_the_caches_of_others_keep_these(tiny_llama: Path) -> None:
    model = deep(tiny_llama, 3)
    layers = list(model.spec.layers)
    for index in (4, 5):
        mixer = layers[index].mixer
        assert isinstance(mixer, AttentionSpec)
        layers[index] = replace(layers[index], mixer=replace(mixer, kv_layer=3))
    model = replace(model, spec=replace(model.spec, layers=tuple(layers)))
    kept = distinct_layers(model, [INT8] * 4)
    assert kept == [0, 3, 4, 5]
    few = with_layers(model, kept)
    assert list(few.spec.cache_layers) == [0, 1]
    assert [layer.cache_place for layer in few.layers] == [0, 1, 1, 1]
