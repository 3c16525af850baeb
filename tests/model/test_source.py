"""Opening models: every fault is named before weights are read."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.teacher_forcing import logits_of

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Tensors = dict[str, torch.Tensor]
    Rebuild = Callable[[Callable[[Tensors], object], dict[str, Any]], Path]

GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def rebuild(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Rebuild:
    """Copy the small model with tensors changed in place and settings replaced."""

    def build(change: Callable[[Tensors], object], settings: dict[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp("changed") / "model"
        shutil.copytree(tiny_llama, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | settings))
        return folder

    return build


def unchanged(tensors: Tensors) -> None:
    pass


def logits(path: Path) -> torch.Tensor:
    cpu = torch.device("cpu")
    return logits_of(load_decoder(open_model(path), REFERENCE, cpu, torch.float32), [5, 6, 7])


def test_biases_of_zeros_and_scales_of_activations_are_left_out_with_a_word(
    rebuild: Rebuild, tiny_llama: Path
) -> None:
    """AutoGPTQ writes a bias beside every weight; transformers drops it, as vLLM does."""
    layer = "model.layers.0"
    others = [f"{layer}.self_attn.{name}" for name in ("q_scale", "prob_output_scale")]
    scales = [*others, f"{layer}.mlp.down_proj.input_scale", f"{layer}.self_attn.k_scale"]

    def add(tensors: Tensors) -> None:
        widths = {name: len(weight) for name, weight in tensors.items() if "proj" in name}
        for name, width in widths.items():
            tensors[name.replace("weight", "bias")] = torch.zeros(width)
        tensors.update({name: torch.tensor(0.5) for name in scales})

    path = rebuild(add, {})
    with_notes = open_model(path)
    assert torch.equal(logits(path), logits(tiny_llama))
    biases, activations = with_notes.notes
    assert biases == "14 biases that are all zero are left out"
    assert activations.startswith("3 parameters of activations, such as model.layers.0.mlp")


def test_a_decoder_that_was_saved_alone_is_the_same_model(
    rebuild: Rebuild, tiny_llama: Path
) -> None:
    """Embedding models such as Qwen3-Embedding have names without `model.`."""

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    bare = rebuild(strip, {})
    assert open_model(bare).family.names.layer == "layers.{}."
    assert torch.equal(logits(bare), logits(tiny_llama))


def test_slots_are_the_tensors_of_the_checkpoint(tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    assert {slot.name for slot in source.slots()} == set(source.weights.tensor_names())
    linears = [slot for slot in source.slots() if slot.is_linear]
    assert len(linears) == 2 * 7
    assert {slot.layer for slot in linears} == {0, 1}


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda t: t.pop(GATE), {}, f"tensor {GATE} is missing"),
        (
            lambda t: t.update({GATE: t[GATE][:-8].clone()}),
            {},
            rf"tensor {GATE} has shape \(120, 64\), .* ask for \(128, 64\)",
        ),
        (unchanged, {"vocab_size": 600}, r"embed_tokens.* shape \(512, 64\), .* \(600, 64\)"),
        (unchanged, {"num_key_value_heads": 4}, r"k_proj.* shape \(32, 64\), .* \(64, 64\)"),
        (unchanged, {"num_hidden_layers": 3}, r"layers\.2\.input_layernorm.weight is missing"),
        (unchanged, {"num_hidden_layers": 1}, r"layers\.1\..* has no place .* 1 layers"),
        (
            lambda t: t.pop("lm_head.weight"),
            {"tie_word_embeddings": False},
            "lm_head.weight is",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            {},
            r'q_proj.bias is not zero, .* set "attention_bias" to true in config.json',
        ),
        (
            lambda t: t.update({"model.layers.0.input_layernorm.bias": torch.ones(64)}),
            {},
            "input_layernorm.bias is not zero, .* of one model and revision",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(2)}),
            {},
            "sinks has no place",
        ),
    ],
)
def test_the_first_problem_is_named(
    rebuild: Rebuild,
    change: Callable[[Tensors], object],
    settings: dict[str, Any],
    message: str,
) -> None:
    path = rebuild(change, settings)
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


def test_leftovers_of_training_do_not_matter(rebuild: Rebuild) -> None:
    tied = {"tie_word_embeddings": True}

    def remove(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert torch.equal(logits(rebuild(add, tied)), logits(rebuild(remove, tied)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [GATE, "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite_are_named(rebuild: Rebuild, name: str, value: float) -> None:
    path = rebuild(lambda tensors: tensors[name].view(-1)[3:4].fill_(value), {})
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinity"):
        logits(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_of_a_type_without_meaning_are_refused(
    rebuild: Rebuild, dtype: torch.dtype
) -> None:
    path = rebuild(lambda tensors: tensors.update({GATE: tensors[GATE].to(dtype)}), {})
    with pytest.raises(UnsupportedModelError, match=f"tensor {GATE} has type {dtype}"):
        logits(path)


def test_large_but_finite_weights_are_accepted(rebuild: Rebuild) -> None:
    path = rebuild(lambda tensors: tensors[GATE].fill_(3e38), {})
    load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["nothing", "file.bin"])
def test_a_path_that_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.bin").write_bytes(b"123")
    with pytest.raises(CheckpointError, match=r"neither a \.gguf file nor a folder"):
        open_model(tmp_path / name)


def test_a_folder_of_another_architecture_names_the_supported_ones(rebuild: Rebuild) -> None:
    path = rebuild(unchanged, {"architectures": ["GPT2LMHeadModel"]})
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported"):
        open_model(path)
