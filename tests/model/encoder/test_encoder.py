"""Encoders against transformers in float32: BERT, XLM-R and ModernBERT, with and without a head."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models import changed_settings
from support.models.encoder_models import (
    BERT,
    FAMILIES,
    make,
    of_one_type,
    of_transformers,
    open_encoder,
    some_texts,
)
from support.models.native_models import LIBRARY

from appliance.engine.nouns.beacon import Beacon
from appliance.errors import ApplianceError, CheckpointError
from appliance.files import read_json, write_json
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.encoder.encoder import TextEncoder
from appliance.model.encoder.loader import load_encoder
from appliance.model.encoder.native import (
    NativeEncoder,
    native_bytes,
    why_unsupported,
    workspace_bytes,
)
from appliance.model.encoder.native_loader import load_native_encoder
from appliance.model.encoder.source import reads_only
from appliance.model.encoder.spec import HeadActivation, RankingSpec
from appliance.model.encoder.texts import Texts
from appliance.model.families.registry import find_family
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLOAT32 = np.dtype(np.float32)
JINAS_NAMES = {
    "embeddings.LayerNorm": "emb_ln",
    "encoder.layer.": "encoder.layers.",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def in_torch(path: Path) -> TextEncoder:
    device = torch.device("cpu")
    return load_encoder(open_encoder(path), torch.float32, device, lambda *_: None)


def in_library(path: Path, bits: int | None = None) -> NativeEncoder:
    engine = NativeEngine(LIBRARY, 1)
    return load_native_encoder(open_encoder(path), engine, FLOAT32, bits, lambda *_: None)


EXECUTORS = [in_torch, in_library]


def states_of(encoder: TextEncoder | NativeEncoder, texts: Texts) -> list[torch.Tensor]:
    return list(torch.from_numpy(encoder.hidden(texts)).split(texts.lengths))


@pytest.mark.parametrize("load", EXECUTORS)
@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states_are_those_of_transformers(
    name: str, load: Callable[[Path], TextEncoder | NativeEncoder], tmp_path: Path
) -> None:
    made = make(name, tmp_path, ranks=False)
    if load is in_library and why_unsupported(open_encoder(tmp_path).spec):
        pytest.skip("torch computes it")
    texts = some_texts(made.longest)
    for own, ids in zip(states_of(load(tmp_path), of_one_type(texts)), texts, strict=True):
        wanted = of_transformers(made.oracle, ids)
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("load", EXECUTORS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_judges_as_in_transformers(
    name: str, load: Callable[[Path], TextEncoder | NativeEncoder], tmp_path: Path
) -> None:
    made = make(name, tmp_path, ranks=True)
    if load is in_library and why_unsupported(open_encoder(tmp_path).spec):
        pytest.skip("torch computes it")
    encoder, mean = load(tmp_path), name.endswith("mean")
    pairs = [(ids, [0] * (len(ids) // 2) + [1] * (-(-len(ids) // 2))) for ids in some_texts(60)]
    if not encoder.num_token_types > 1:
        pairs = [(ids, [0] * len(ids)) for ids, _ in pairs]
    hidden = states_of(encoder, Texts.of(pairs))
    chosen = torch.stack([one.mean(0) if mean else one[0] for one in hidden])
    found = encoder.rank(chosen.numpy())
    for own, (ids, types) in zip(found, pairs, strict=True):
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
        if encoder.num_token_types > 1:
            inputs["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            wanted = made.oracle(**inputs).logits[0, 0]
        assert float(own) == pytest.approx(float(wanted), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("load", EXECUTORS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["word_embeddings.weight", "LayerNorm.bias", "query.weight"])
def test_a_weight_that_is_no_number_is_refused_by_name(
    part: str, value: float, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    make("bert", tmp_path, ranks=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(part))
    tensors[name].flatten()[-1] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor {re.escape(name)} holds NaN or infinity"):
        load(tmp_path)


def test_a_text_has_the_same_bits_alone_and_in_company(tmp_path: Path) -> None:
    """Each text is longer than the one before, so that leftovers in the cache would show."""
    make("modernbert", tmp_path, ranks=False)
    encoder, texts = in_library(tmp_path), some_texts(300)
    together = states_of(encoder, of_one_type(texts))
    for own, ids in zip(together, texts, strict=True):
        assert torch.equal(own, states_of(encoder, of_one_type([ids]))[0])


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_weights_and_workspace_are_no_more_than_planned(name: str, tmp_path: Path) -> None:
    source = open_encoder(make(name, tmp_path, ranks=False).path)
    texts = of_one_type(some_texts(200))
    for bits in (None, 8):
        encoder = in_library(tmp_path, bits)
        planned = native_bytes(source, FLOAT32, bits)
        assert 0.7 * planned < encoder.weight_bytes <= planned
    encoder.hidden(texts)
    taken = encoder.engine.workspace_bytes
    assert taken <= workspace_bytes(source.spec, len(texts.ids), len(texts.lengths), 1)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_rounded_weights_give_nearly_the_same_directions(name: str, tmp_path: Path) -> None:
    made = make(name, tmp_path, ranks=False)
    texts = some_texts(100)
    encoder = in_library(tmp_path, 8)
    assert encoder.weight_format == "8 bits (a scale per row)"
    for own, ids in zip(states_of(encoder, of_one_type(texts)), texts, strict=True):
        wanted = of_transformers(made.oracle, ids)
        alike = torch.nn.functional.cosine_similarity(own.mean(0), wanted.mean(0), dim=0)
        assert 0.99 < float(alike) < 0.9999999


def test_what_the_library_does_not_cover_is_said(tmp_path: Path) -> None:
    spec = open_encoder(make("bert", tmp_path, ranks=False).path).spec
    assert why_unsupported(spec) is None
    narrow = replace(spec, num_heads=8)
    assert "heads have 8 elements" in str(why_unsupported(narrow))
    twice = replace(spec, norms_follow=False)
    assert "norms the embedding twice" in str(why_unsupported(twice))
    judging = replace(spec, positions=0, ranking=RankingSpec(HeadActivation.TANH))
    assert "without learned positions" in str(why_unsupported(judging))


def test_a_progress_is_told_layer_by_layer(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    told: list[int] = []
    source, device = open_encoder(tmp_path), torch.device("cpu")
    encoder = load_encoder(source, torch.float32, device, lambda *_: None, lambda: told.append(1))
    encoder.hidden(of_one_type([[3]]))
    assert len(told) == 4
    native, beacon = in_library(tmp_path), Beacon()
    native.engine.watch(beacon.address)
    before = beacon.progress
    native.hidden(of_one_type([[3]]))
    assert beacon.progress - before >= 4


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


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, False) for name in FAMILIES if name != "modernbert-mean"), ("modernbert-mean", True)],
)
def test_a_changed_setting_means_what_it_means_to_transformers(
    name: str, ranks: bool, tmp_path: Path
) -> None:
    made = make(name, tmp_path, ranks=ranks)
    texts = of_one_type([list(range(20, 97, 2))])

    def ours_of() -> torch.Tensor:
        encoder = in_torch(tmp_path)
        hidden = encoder.hidden(texts)
        if (head := encoder.spec.ranking) is None:
            return torch.from_numpy(hidden)
        return torch.from_numpy(encoder.rank(hidden.mean(0)[None] if head.mean else hidden[:1]))

    oracle = changed_settings.Oracle(made.oracle, texts.ids.tolist())
    expected = oracle.logits(read_json(tmp_path / "config.json"))
    assert expected is not None
    torch.testing.assert_close(ours_of(), expected, atol=1e-4, rtol=0)
    found, compared = changed_settings.disagreements(
        tmp_path,
        oracle,
        lambda: open_encoder(tmp_path).spec,
        ours_of,
        changed_settings.HARMLESS - {"pad_token_id"},  # RoBERTa counts positions from here
    )
    assert "\n".join(found) == ""
    assert compared > 6  # some changes are accepted


def test_settings_of_the_code_before_the_class_mean_the_same(tmp_path: Path) -> None:
    """nomic-embed-text and gte were published like this; transformers' class reads neither."""
    make("nomic-bert", tmp_path, ranks=False)
    spec, config = open_encoder(tmp_path).spec, read_json(tmp_path / "config.json")
    older = {
        "model_type": "nomic_bert",
        "vocab_size": config["vocab_size"],
        "type_vocab_size": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 4,
        "n_inner": 96,
        "rotary_emb_base": 500,
        "max_trained_positions": 210,
        "n_positions": 8192,
        "layer_norm_epsilon": 1e-12,
        "activation_function": "swiglu",
        "rotary_emb_fraction": 1.0,
        "prenorm": False,
    }
    write_json(tmp_path / "config.json", older)
    assert open_encoder(tmp_path).spec == spec
    for change, words in (
        ({"num_experts": 8}, "num_experts"),
        ({"prenorm": True}, "prenorm"),
        ({"qkv_proj_bias": True}, "Wqkv.bias is missing"),
    ):
        write_json(tmp_path / "config.json", older | change)
        with pytest.raises(ApplianceError, match=words):
            open_encoder(tmp_path)
    make("gte", tmp_path, ranks=False)
    spec, config = open_encoder(tmp_path).spec, read_json(tmp_path / "config.json")
    theta = config.pop("rope_parameters")["rope_theta"]
    older = config | {"model_type": "new", "rope_theta": theta, "position_embedding_type": "rope"}
    write_json(tmp_path / "config.json", older)
    assert open_encoder(tmp_path).spec == spec
    scaling = {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}
    write_json(tmp_path / "config.json", older | {"rope_scaling": scaling})
    with pytest.raises(ApplianceError, match="mixed_b"):
        open_encoder(tmp_path)


@pytest.mark.parametrize("load", EXECUTORS)
def test_gtes_scaling_is_that_of_its_makers_code(
    load: Callable[[Path], TextEncoder | NativeEncoder], tmp_path: Path
) -> None:
    """As NTKScalingRotaryEmbedding in gte-large-en-v1.5's modeling.py, without mixed_b."""
    oracle = make("gte", tmp_path, ranks=False).oracle
    config = read_json(tmp_path / "config.json")
    theta = config.pop("rope_parameters")["rope_theta"]
    scaling = {"rope_theta": theta, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    write_json(tmp_path / "config.json", config | {"model_type": "new", **scaling})
    width = 16  # settings of a head
    frequencies = 1.0 / ((8.0 * theta) ** (torch.arange(0, width, 2).float() / width))
    oracle.rotary_emb.inv_freq = frequencies / 8.0 ** (2 / width)
    ids = list(range(20, 90))
    own = torch.from_numpy(load(tmp_path).hidden(of_one_type([ids])))
    torch.testing.assert_close(own, of_transformers(oracle, ids), rtol=1e-4, atol=2e-5)


class _Gated(torch.nn.Module):
    """Jina 2's MLP, including its norm, in place of BERT's `intermediate`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gated_layers = torch.nn.Linear(width, 2 * 96, bias=False)
        self.wo = torch.nn.Linear(96, width)
        self.layernorm = torch.nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.gated_layers(x).chunk(2, -1)
        found: torch.Tensor = self.layernorm(x + self.wo(torch.nn.functional.gelu(gate) * value))
        return found


class _Passed(torch.nn.Module):
    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("heads", [4, 6])
def test_jina_2_is_bert_with_slopes_and_gates(heads: int, tmp_path: Path) -> None:
    """The oracle is transformers' BERT with a mask that falls as in ALiBi's paper.

    The slopes of 4 heads are 1/4, 1/16, 1/64, 1/256; 6 heads have these, and 1/2 and 1/8 of 8
    heads.
    """
    hidden = 16 * heads
    torch.manual_seed(3)
    settings = {**BERT, "hidden_size": hidden, "num_attention_heads": heads}
    config = transformers.BertConfig(**settings, attn_implementation="eager")
    oracle = transformers.BertModel(config, add_pooling_layer=False).eval()
    for layer in oracle.encoder.layer:
        layer.intermediate, layer.output = _Gated(hidden), _Passed()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        oracle.embeddings.position_embeddings.weight.zero_()
    weights = {
        name.replace("intermediate.", "mlp."): tensor
        for name, tensor in oracle.state_dict().items()
        if "position" not in name
    }
    save_file(weights, tmp_path / "model.safetensors")
    jinas = {"position_embedding_type": "alibi", "feed_forward_type": "geglu", "model_type": "bert"}
    named = {"architectures": ["JinaBertForMaskedLM"], "emb_pooler": "mean"}
    write_json(tmp_path / "config.json", {**settings, **jinas, **named, "hidden_act": "gelu"})
    assert why_unsupported(open_encoder(tmp_path).spec)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8][:heads])
    texts = some_texts(150)
    for own, ids in zip(states_of(in_torch(tmp_path), of_one_type(texts)), texts, strict=True):
        place = torch.arange(len(ids)).float()
        mask = -slopes[:, None, None] * (place[:, None] - place).abs()
        with torch.inference_mode():
            wanted = oracle(torch.tensor([ids]), attention_mask=mask[None]).last_hidden_state[0]
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("load", EXECUTORS)
def test_names_of_jinas_code_are_read(
    load: Callable[[Path], TextEncoder | NativeEncoder], tmp_path: Path
) -> None:
    """jina-reranker-v2 names XLM-RoBERTa's tensors so, with fused queries, keys and values."""
    oracle = make("xlm-roberta", tmp_path, ranks=True).oracle
    weights = load_file(tmp_path / "model.safetensors")
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        for old, new in JINAS_NAMES.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    for name in [name for name in renamed if ".self.query." in name]:
        parts = [name.replace("query", part) for part in ("query", "key", "value")]
        joined = name.replace("attention.self.query", "mixer.Wqkv")
        renamed[joined] = torch.cat([renamed.pop(part) for part in parts])
    save_file(renamed, tmp_path / "model.safetensors")
    encoder, ids = load(tmp_path), list(range(2, 40))
    found = encoder.rank(states_of(encoder, of_one_type([ids]))[0][:1].numpy())
    with torch.inference_mode():
        wanted = oracle(torch.tensor([ids])).logits[0, 0]
    assert float(found[0]) == pytest.approx(float(wanted), rel=1e-4, abs=1e-4)


def test_jinas_second_form_is_refused_with_what_to_take(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    config = read_json(tmp_path / "config.json")
    jinas = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    code = {"AutoConfig": "jinaai/jina-bert-v2-qk-post-norm--configuration_bert.JinaBertConfig"}
    write_json(tmp_path / "config.json", config | jinas | {"auto_map": code})
    with pytest.raises(ApplianceError, match=r"qk-post-norm.*jina-embeddings-v3-hf"):
        open_encoder(tmp_path)


def test_jinas_adapters_are_refused_with_what_to_take(tmp_path: Path) -> None:
    make("xlm-roberta", tmp_path, ranks=False)
    config = read_json(tmp_path / "config.json")
    jinas = {"position_embedding_type": "rotary", "lora_adaptations": ["retrieval.query"]}
    write_json(tmp_path / "config.json", config | jinas)
    with pytest.raises(ApplianceError, match="jina-embeddings-v3-hf"):
        open_encoder(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]}, "relative position"),
        ({"model_type": "neobert", "architectures": ["NeoBERT"]}, "no class of it"),
        ({"model_type": "eurobert", "architectures": ["EuroBertModel"]}, "reads texts and writes"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "writes none"),
        ({"model_type": "qwen3", "architectures": ["Qwen3Model"]}, "serves its embeddings or"),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "is_causal": False},
            "serves its embeddings or",
        ),
    ],
)
def test_other_encoders_are_refused_with_the_reason(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ApplianceError, match=words):
        find_family(config)


def test_names_of_another_model_are_said(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"model_type": "nomic_bert"})
    weights = load_file(tmp_path / "model.safetensors")
    save_file({f"x.{name}": each for name, each in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ApplianceError, match=r"looked for .*stored are x\.embeddings"):
        open_encoder(tmp_path)


def test_a_decoder_is_no_encoder_and_an_encoder_no_decoder(tmp_path: Path) -> None:
    make("bert", tmp_path, ranks=False)
    assert reads_only(tmp_path)
    with pytest.raises(ApplianceError, match="is an encoder"):
        open_model(tmp_path)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", {**config, "model_type": "llama"})
    assert not reads_only(tmp_path)
