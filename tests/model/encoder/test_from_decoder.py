"""Decoders as encoders against transformers in float32: bidirectional ones, and base classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.models import changed_settings
from support.models.encoder_models import (
    DECODERS,
    JUDGES,
    make_decoder,
    make_judge,
    of_one_type,
    of_transformers,
    open_decoder,
    some_texts,
)
from support.models.native_models import LIBRARY

from appliance.errors import ApplianceError
from appliance.files import read_json, write_json
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.encoder.decoder_loader import DecoderReader, load_decoder_reader
from appliance.model.encoder.native import NativeEncoder, decoder_workspace_bytes
from appliance.model.encoder.native_loader import load_native_decoder
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


def judged(reader: DecoderReader | NativeEncoder, texts: list[list[int]]) -> list[float]:
    """Return the logits of texts, which must be sorted by length."""
    together = of_one_type(texts)
    states = np.split(reader.hidden(together), together.starts[1:-1])
    assert reader.ranking is not None
    chosen = [reader.ranking.judged(x, ids) for x, ids in zip(states, texts, strict=True)]
    return [float(logit) for logit in reader.rank(np.stack(chosen))]


# 0 is the padding token of the models that have one.
TEXTS = [[5, 6, 7], [5, 9, 0, 0], [8, 0, 3, 11, 0], [0, 0, 0, 0, 0], [*range(20, 60)]]


@pytest.mark.parametrize("load", [in_torch, in_library])
@pytest.mark.parametrize("name", JUDGES)
def test_a_head_judges_as_in_transformers(
    name: str, load: Callable[[Path], DecoderReader | NativeEncoder], tmp_path: Path
) -> None:
    oracle = make_judge(name, tmp_path)
    assert reads_only(tmp_path)
    for ids, own in zip(TEXTS, judged(load(tmp_path), TEXTS), strict=True):
        with torch.inference_mode():
            wanted = oracle(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits
        assert own == pytest.approx(float(wanted[0, 0]), rel=1e-4, abs=2e-5)


@pytest.mark.parametrize("load", [in_torch, in_library])
def test_nvidias_head_reads_means_both_ways(
    load: Callable[[Path], DecoderReader | NativeEncoder], tmp_path: Path
) -> None:
    """llama-nemotron-rerank describes it: logit = score(mean) / temperature."""
    oracle = make_judge("llama", tmp_path)
    oracle.config.is_causal = False
    config = read_json(tmp_path / "config.json")
    named = {
        "architectures": ["LlamaBidirectionalForSequenceClassification"],
        "model_type": "llama_bidirec",
        "pooling": "avg",
        "temperature": 0.25,
    }
    write_json(tmp_path / "config.json", {**config, **named})
    for ids, own in zip(TEXTS, judged(load(tmp_path), TEXTS), strict=True):
        with torch.inference_mode():
            state = of_transformers(oracle.model, ids).mean(0)
            wanted = float(oracle.score(state)) / 0.25
        assert own == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_a_head_of_several_classes_is_refused(tmp_path: Path) -> None:
    make_judge("qwen3", tmp_path)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**config, "id2label": {"0": "no", "1": "yes"}})
    with pytest.raises(ApplianceError, match="id2label has 2 labels"):
        open_decoder(tmp_path)


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
    assert compared > 6  # some changes are accepted


def test_weights_and_workspace_are_no_more_than_planned(tmp_path: Path) -> None:
    make_decoder("embeddinggemma", tmp_path)
    source, texts = open_decoder(tmp_path), of_one_type(some_texts(200))
    decoder = in_library(tmp_path)
    planned = estimate_native_bytes(source, FLOAT32)
    # Rotary frequencies are not weights.
    assert 0.7 * planned < decoder.weight_bytes <= planned + 2**12
    decoder.hidden(texts)
    most = decoder_workspace_bytes(source.spec, len(texts.ids), len(texts.lengths), 1)
    assert decoder.engine.workspace_bytes <= most


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "voyage"}, "model_type 'voyage' of Gemma3TextModel is not one"),
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
