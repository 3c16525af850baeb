"""Tied models whose files store a head: the result must be transformers' for the same folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of
from support.ranks.rank_threads import RankThreads
from support.ranks.stage_threads import StageThreads
from support.ranks.torch_ranks import TorchRankThreads
from transformers import AutoModelForCausalLM

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.shard.split import Split
from appliance.model.size import estimate_weight_bytes
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from appliance.model.source import ModelSource

CPU_DEVICE = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WIDTHS: dict[str, Any] = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
# Tied by default or by the setting, of our own families and of transformers' modules.
MODELS = {
    "llama": WIDTHS | {"tie_word_embeddings": True},
    "gemma3_text": WIDTHS | {"tie_word_embeddings": True},
    "lfm2": {"hidden_size": 64, "num_attention_heads": 4},
    "helium": WIDTHS | {"tie_word_embeddings": True},
}
STORED = ["other values", "equal values", "head alone"]


def store(folder: Path, what: str) -> None:
    """Change the embedding and the head that a tied checkpoint stores."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors[EMBEDDING]
    tensors[HEAD] = embedding.clone()
    if what == "other values":
        tensors[HEAD][-1] = -embedding[-1]  # the row of one token
    if what == "head alone":
        del tensors[EMBEDDING]
    save_file(tensors, path, {"format": "pt"})


def logits_of_all_executors(source: ModelSource, token_ids: list[int]) -> list[Tensor]:
    engine = NativeEngine(LIBRARY, 1)
    if source.fallback is not None:
        library = LibraryOperations(engine, torch.float32)
        return [logits_of(load_fallback(source, library, torch.float32), token_ids)]
    return [
        logits_of(load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32), token_ids),
        logits_of(load_native(source, engine, torch.float32), token_ids),
    ]


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(
    family: str,
    what: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    folder = save(make_model(family, **MODELS[family]))
    store(folder, what)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    source = open_model(folder)
    for found in logits_of_all_executors(source, token_ids):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    is_apart = what == "other values"
    assert source.spec.tied_head is not is_apart
    assert [EMBEDDING in note for note in source.notes] == [True] * is_apart
    assert source.num_parameters() == theirs.num_parameters()  # a tied head counts once
    names = [slot.name for slot in source.slots()]
    assert names.count(EMBEDDING) == 1
    assert names.count(HEAD) == is_apart


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("family", [name for name in MODELS if name != "helium"])
def test_so_are_those_of_ranks_and_stages(
    family: str,
    what: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    folder = save(make_model(family, **MODELS[family] | {"intermediate_size": 160}))
    store(folder, what)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([token_ids])).logits[0]
    source, split = open_model(folder), Split.parse(2, "1:1")
    found = [
        RankThreads(source, split, max_rows=64).logits_of(token_ids),
        TorchRankThreads(source, split).logits_of(token_ids),
        StageThreads(source, (0, 2, 3), max_rows=64).logits_of(token_ids),
    ]
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)


def test_a_second_matrix_is_in_the_memory_plan(
    make_model: Callable[..., Any], save: Callable[[Any], Path]
) -> None:
    folder = save(make_model("llama", **MODELS["llama"]))
    one = estimate_weight_bytes(open_model(folder), CPU_DEVICE, torch.float32)
    store(folder, "equal values")
    assert estimate_weight_bytes(open_model(folder), CPU_DEVICE, torch.float32) == one
    store(folder, "other values")
    two = estimate_weight_bytes(open_model(folder), CPU_DEVICE, torch.float32)
    assert two == one + 4 * 97 * 64


@pytest.mark.parametrize("what", STORED)
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", ["gemma3_text", "helium"])
def test_so_are_those_of_a_text_part(
    family: str,
    prefix: str,
    what: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    text = save(make_model(family, **MODELS[family]))
    store(text, what)
    expected = logits_of_all_executors(open_model(text), token_ids)
    settings = json.loads((text / "config.json").read_text())
    whole = tmp_path / "whole"
    whole.mkdir()
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (whole / "config.json").write_text(json.dumps(config | {"text_config": settings}))
    tensors = load_file(text / "model.safetensors")
    if prefix.startswith("language_model.") and HEAD in tensors:
        tensors[f"language_model.{HEAD}"] = tensors.pop(HEAD)
    parted = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(parted, whole / "model.safetensors", {"format": "pt"})
    source = open_model(whole)
    assert source.spec.tied_head is (what != "other values")
    for one, other in zip(logits_of_all_executors(source, token_ids), expected, strict=True):
        assert torch.equal(one, other)
