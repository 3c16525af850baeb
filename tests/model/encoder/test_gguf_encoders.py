"""GGUF files of encoders against transformers' vectors of the folders from which they were made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf.encoder_gguf import MEAN, RANK, q8_0, write_encoder_gguf
from support.gguf.gguf_files import write_gguf_file
from support.models.encoder_models import (
    DECODERS,
    FAMILIES,
    Made,
    make,
    make_decoder,
    of_one_type,
    of_transformers,
    some_texts,
)
from support.models.native_models import LIBRARY

from appliance.engine.nouns.request import Pooling
from appliance.errors import ApplianceError
from appliance.gguf import GGUFFile
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.encoder.decoder_loader import load_decoder_reader
from appliance.model.encoder.loader import load_encoder
from appliance.model.encoder.native import native_bytes
from appliance.model.encoder.native_loader import load_native_decoder, load_native_encoder
from appliance.model.encoder.source import EncoderSource, open_checked, reads_only
from appliance.model.families.registry import family_of_gguf
from appliance.model_files.retrieval_recipe import recipe_of_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.model.encoder.native import NativeEncoder

FLOAT32 = np.dtype(np.float32)
NAMES = ["bert", "xlm-roberta", "nomic-bert", "jina-v3", "modernbert", "embeddinggemma", "eurobert"]
NAMES += ["qwen2-two-way"]


def in_torch(path: Path) -> Any:
    source, device = open_checked(path), torch.device("cpu")
    if isinstance(source, EncoderSource):
        return load_encoder(source, torch.float32, device, lambda *_: None)
    return load_decoder_reader(source, torch.float32, device, lambda *_: None)


def in_library(path: Path) -> NativeEncoder:
    source, engine = open_checked(path), NativeEngine(LIBRARY, 1)
    if isinstance(source, EncoderSource):
        return load_native_encoder(source, engine, FLOAT32, None, lambda *_: None)
    return load_native_decoder(source, engine, FLOAT32, lambda *_: None)


def made_folder(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    if name in FAMILIES:
        return make(name, path, ranks=False)
    if name == "embeddinggemma":  # a file does not say which layers slide: all except every sixth
        kind, model, settings, longest = DECODERS[name]
        as_published = {**settings, "num_hidden_layers": 7, "layer_types": None}
        monkeypatch.setitem(DECODERS, name, (kind, model, as_published, longest))
    return make_decoder(name, path)


@pytest.mark.parametrize("load", [in_torch, in_library])
@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_are_those_of_the_folder(
    name: str, load: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_folder(name, tmp_path, monkeypatch)
    pattern: dict[str, Any] = {}
    if name == "modernbert":
        pattern["attention.sliding_window_pattern"] = 3
    file = write_encoder_gguf(tmp_path, MEAN, **pattern)
    assert reads_only(file)
    texts = some_texts(made.longest)
    together = of_one_type(texts)
    states = torch.from_numpy(load(file).hidden(together)).split(together.lengths)
    for own, ids in zip(states, texts, strict=True):
        torch.testing.assert_close(own, of_transformers(made.oracle, ids), rtol=1e-4, atol=2e-5)


def test_ollamas_first_embeddinggemma_is_read_as_its_own_program_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names Gemma 3; ollama/ollama's llama/compat (README, table) decides."""
    made = made_folder("embeddinggemma", tmp_path, monkeypatch)
    plain = GGUFFile(write_encoder_gguf(tmp_path, None), in_torch=False, vocabulary=False)
    settings = {
        key.removeprefix("gemma-embedding."): value
        for key, value in plain.metadata.items()
        if key.startswith("gemma-embedding.")
    }
    eps, near = settings.pop("attention.layer_norm_rms_epsilon"), settings.pop("rope.freq_base_swa")
    assert (eps, near) == (pytest.approx(1e-6), 10000.0)  # settings that the file leaves out
    settings["rope.global.freq_base"] = settings.pop("rope.freq_base")
    settings |= {"pooling_type": MEAN, "attention.sliding_window_pattern": [True] * 7}
    tensors = {name: torch.tensor(np.asarray(plain.load(name))) for name in plain.tensor_names()}
    tensors["norm.weight"] = tensors.pop("output_norm.weight")
    torch.manual_seed(3)
    linears = [torch.randn(96, 64), torch.randn(64, 96)]
    tensors |= {f"dense.{number}.weight": linear for number, linear in enumerate(linears)}
    file = write_gguf_file(tmp_path / "sha256-0", "gemma3", settings, tensors)
    assert reads_only(file)
    texts = of_one_type(some_texts(60))
    states = torch.from_numpy(in_library(file).hidden(texts)).split(texts.lengths)
    for own, ids in zip(states, some_texts(60), strict=True):
        torch.testing.assert_close(own, of_transformers(made.oracle, ids), rtol=1e-4, atol=2e-5)
    metadata = GGUFFile(file, in_torch=False, vocabulary=False).metadata
    recipe = recipe_of_gguf(metadata, file).embedding
    assert (recipe.pooling, recipe.refused) == (Pooling.MEAN, "")
    for step, linear in zip(recipe.dense, linears, strict=True):
        np.testing.assert_array_equal(step.weight, linear.numpy())


@pytest.mark.parametrize("load", [in_torch, in_library])
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen2-two-way"])
def test_rounded_files_give_nearly_the_same_directions(
    name: str, load: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = made_folder(name, tmp_path, monkeypatch)
    file = write_encoder_gguf(tmp_path, MEAN, q8_0)
    texts = of_one_type(some_texts(60))
    reader = load(file)
    source = open_checked(file)
    if isinstance(source, EncoderSource) and load is in_library:
        assert "8 bits" in reader.weight_format
        assert reader.weight_bytes <= native_bytes(source, FLOAT32, None)
    states = torch.from_numpy(reader.hidden(texts)).split(texts.lengths)
    for own, ids in zip(states, some_texts(60), strict=True):
        wanted = of_transformers(made.oracle, ids)
        alike = torch.nn.functional.cosine_similarity(own.mean(0), wanted.mean(0), dim=0)
        assert 0.99 < float(alike) < 0.9999999


@pytest.mark.parametrize("load", [in_torch, in_library])
@pytest.mark.parametrize("name", ["xlm-roberta", "modernbert", "modernbert-mean"])
def test_a_head_judges_as_in_the_folder(
    name: str, load: Callable[[Path], Any], tmp_path: Path
) -> None:
    made = make(name, tmp_path, ranks=True)
    mean = name.endswith("mean")
    settings: dict[str, Any] = (
        {} if "modern" not in name else {"classifier.pooling_type": 1 if mean else 2}
    )
    encoder = load(write_encoder_gguf(tmp_path, RANK, **settings))
    texts = some_texts(60)
    hidden = torch.from_numpy(encoder.hidden(of_one_type(texts))).split([len(t) for t in texts])
    chosen = torch.stack([one.mean(0) if mean else one[0] for one in hidden])
    for own, ids in zip(encoder.rank(chosen.numpy()), texts, strict=True):
        with torch.inference_mode():
            wanted = made.oracle(torch.tensor([ids]), torch.ones(1, len(ids))).logits[0, 0]
        assert float(own) == pytest.approx(float(wanted), rel=1e-4, abs=1e-4)


def test_one_row_without_its_dimension_is_read(tmp_path: Path) -> None:
    """llama.cpp's quantizer writes BGE-M3's only token type like this."""
    made = make("xlm-roberta", tmp_path, ranks=False)
    reader = gguf.GGUFReader(write_encoder_gguf(tmp_path))
    writer = gguf.GGUFWriter(tmp_path / "flat.gguf", "bert")
    for key, field in reader.fields.items():
        if key.startswith("bert."):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        flat = tensor.data[0] if tensor.name == "token_types.weight" else tensor.data
        writer.add_tensor(tensor.name, flat)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    texts = of_one_type([[5, 6, 7]])
    found = torch.from_numpy(in_library(tmp_path / "flat.gguf").hidden(texts))
    wanted = of_transformers(made.oracle, [5, 6, 7])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "pooling", "changes", "words"),
    [
        ("bert", None, {}, "pooling_type is None, so it is not known how"),
        ("bert", RANK, {}, "asks for pooling by a head for ranking and has no tensor cls.weight"),
        ("bert", MEAN, {"block_count": 3}, "blk.3.* has no place"),
        ("bert", MEAN, {"block_count": 5}, "blk.4.attn_q.weight is missing"),
        ("bert", MEAN, {"attention.head_count": 5}, "attention.head_count"),
        ("nomic-bert", MEAN, {"rope.scaling.type": "yarn"}, "rope.scaling.type"),
        ("modernbert", MEAN, {"hidden_activation": "mish"}, "hidden_activation"),
        ("eurobert", None, {}, "pooling_type is None"),
        ("qwen2-two-way", RANK, {}, "pooling_type is 4"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    name: str,
    pooling: int | None,
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made_folder(name, tmp_path, monkeypatch)
    file = write_encoder_gguf(tmp_path, pooling, **changes)
    with pytest.raises(ApplianceError, match=words):
        open_checked(file)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("jina-bert-v2", "ALiBi"),
        ("neo-bert", "no class of"),
        ("t5encoder", "relative position"),
        ("nomic-bert", "serves its embeddings"),
    ],
)
def test_other_files_are_refused_with_the_reason(label: str, words: str) -> None:
    with pytest.raises(ApplianceError, match=words):
        family_of_gguf({"general.architecture": label})
