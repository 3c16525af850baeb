"""Encoders against transformers in float32: BERT, XLM-R and ModernBERT, with and without a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from encoder_models import FAMILIES, make

from appliance.errors import ApplianceError
from appliance.files import read_json, write_json
from appliance.model.encoder.encoder import TextEncoder, Texts, load_encoder
from appliance.model.encoder.source import is_encoder, open_encoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from pathlib import Path


def load(path: Path, dtype: torch.dtype = torch.float32) -> TextEncoder:
    device = torch.device("cpu")
    return load_encoder(open_encoder(path), dtype, device, lambda stage, done, total: None)


def some_texts(longest: int) -> list[list[int]]:
    torch.manual_seed(2)
    lengths = sorted([1, 5, 5, 33, longest])
    return [torch.randint(2, 97, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    made = make(name, tmp_path, ranks=False)
    texts = some_texts(made.longest)
    batch = Texts.of([(ids, [0] * len(ids)) for ids in texts], torch.device("cpu"))
    with torch.inference_mode():
        found = load(tmp_path).hidden(batch).split(batch.lengths)
        for own, ids in zip(found, texts, strict=True):
            mask = torch.ones(1, len(ids), dtype=torch.int64)
            wanted = made.oracle(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_judges_as_in_transformers(name: str, tmp_path: Path) -> None:
    made = make(name, tmp_path, ranks=True)
    encoder, mean = load(tmp_path), name.endswith("mean")
    pairs = [(ids, [0] * (len(ids) // 2) + [1] * (-(-len(ids) // 2))) for ids in some_texts(60)]
    if not encoder.spec.token_types > 1:
        pairs = [(ids, [0] * len(ids)) for ids, _ in pairs]
    batch = Texts.of(pairs, torch.device("cpu"))
    with torch.inference_mode():
        hidden = encoder.hidden(batch).split(batch.lengths)
        chosen = torch.stack([one.mean(0) if mean else one[0] for one in hidden])
        found = encoder.rank(chosen)
        for own, (ids, types) in zip(found, pairs, strict=True):
            inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
            if encoder.spec.token_types > 1:
                inputs["token_type_ids"] = torch.tensor([types])
            wanted = made.oracle(**inputs).logits[0, 0]
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


def test_a_text_alone_and_in_company_are_close(tmp_path: Path) -> None:
    make("modernbert", tmp_path, ranks=False)
    encoder, texts = load(tmp_path), some_texts(100)
    with torch.inference_mode():
        batch = Texts.of([(ids, [0] * len(ids)) for ids in texts], torch.device("cpu"))
        together = encoder.hidden(batch).split(batch.lengths)
        for own, ids in zip(together, texts, strict=True):
            alone = Texts.of([(ids, [0] * len(ids))], torch.device("cpu"))
            torch.testing.assert_close(own, encoder.hidden(alone), rtol=1e-4, atol=1e-5)


def test_a_progress_is_told_layer_by_layer(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    told: list[int] = []
    source, device = open_encoder(tmp_path), torch.device("cpu")
    encoder = load_encoder(source, torch.float32, device, lambda *_: None, lambda: told.append(1))
    encoder.hidden(Texts.of([([3], [0])], device))
    assert len(told) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_hidden_layers": 5}, "encoder.layer.4.attention.self.query.weight is missing"),
        ({"num_hidden_layers": 3}, "has no place"),
        ({"intermediate_size": 81}, "shape"),
        ({"vocab_size": "97"}, "vocab_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["BertForSequenceClassification"]}, "id2label has 2 labels"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make("bert", tmp_path, ranks=False)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**config, **change})
    with pytest.raises(ApplianceError, match=words):
        open_encoder(tmp_path)


def test_a_decoder_is_no_encoder_and_an_encoder_no_decoder(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    assert is_encoder(tmp_path)
    with pytest.raises(ApplianceError, match="is an encoder"):
        open_model(tmp_path)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**config, "model_type": "llama"})
    assert not is_encoder(tmp_path)
