"""Decoders that only read against transformers in float32: two-way ones, and base classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import changed_settings
import numpy as np
import pytest
import torch
from encoder_models import DECODERS, make_decoder, of_one_type, of_transformers, some_texts
from native_models import LIBRARY

from appliance.errors import ApplianceError
from appliance.files import read_json, write_json
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.encoder.decoder_loader import DecoderReader, load_decoder_reader
from appliance.model.encoder.from_decoder import open_decoder
from appliance.model.encoder.native import NativeEncoder
from appliance.model.encoder.native_loader import load_native_decoder
from appliance.model.encoder.native_size import decoder_workspace_bytes
from appliance.model.encoder.source import reads_only
from appliance.model.size import estimate_native_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLOAT32 = np.dtype(np.float32)


def in_torch(path: Path) -> DecoderReader:
    device = torch.device("cpu")
    return load_decoder_reader(open_decoder(path), torch.float32, device, lambda *_: None)


def in_library(path: Path) -> NativeEncoder:
    engine = NativeEngine(LIBRARY, 1)
    return load_native_decoder(open_decoder(path), engine, FLOAT32, lambda *_: None)


@pytest.mark.parametrize("load", [in_torch, in_library])
@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_are_those_of_transformers(
    name: str, load: Callable[[Path], DecoderReader | NativeEncoder], tmp_path: Path
) -> None:
    made = make_decoder(name, tmp_path)
    assert reads_only(tmp_path)
    texts = some_texts(made.longest)
    together = of_one_type(texts)
    states = torch.from_numpy(load(tmp_path).hidden(together)).split(together.lengths)
    for own, ids in zip(states, texts, strict=True):
        torch.testing.assert_close(own, of_transformers(made.oracle, ids), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["embeddinggemma", "eurobert"])
def test_a_changed_setting_means_what_it_means_to_transformers(name: str, tmp_path: Path) -> None:
    made = make_decoder(name, tmp_path)
    texts = of_one_type([list(range(20, 97, 2))])
    oracle = changed_settings.Oracle(made.oracle, texts.ids.tolist())
    found, compared = changed_settings.disagreements(
        tmp_path,
        oracle,
        lambda: open_decoder(tmp_path).spec,
        lambda: torch.from_numpy(in_torch(tmp_path).hidden(texts)),
    )
    assert "\n".join(found) == ""
    assert compared > 6  # not all is refused


def test_weights_and_workspace_are_no_more_than_planned(tmp_path: Path) -> None:
    make_decoder("embeddinggemma", tmp_path)
    source, texts = open_decoder(tmp_path), of_one_type(some_texts(200))
    decoder = in_library(tmp_path)
    planned = estimate_native_bytes(source, FLOAT32)
    # Frequencies of rotation are not weights.
    assert 0.7 * planned < decoder.weight_bytes <= planned + 2**12
    decoder.hidden(texts)
    most = decoder_workspace_bytes(source.spec, len(texts.ids), len(texts.lengths), 1)
    assert decoder.engine.workspace_bytes <= most


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "voyage"}, "model_type 'voyage' of Gemma3TextModel is not one"),
        ({"attn_logit_softcapping": 5.0}, r"capped \(attn_logit_softcapping"),
        ({"num_hidden_layers": 3}, "has no place"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_decoder("embeddinggemma", tmp_path)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**config, "layer_types": None, **change})
    with pytest.raises(ApplianceError, match=words):
        open_decoder(tmp_path)
