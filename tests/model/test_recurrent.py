"""Families with recurrent layers against transformers in float32, in both executors."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.native_models import native
from support.models.recurrent_models import (
    RECURRENT,
    SIZES,
    Running,
    advance,
    allocate,
    logits_in_steps,
)

from appliance.errors import ModelError, UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.backend import CPU, REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.native import why_unsupported
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.cpu.structs import Isa
    from appliance.kernels.operations import Backend
    from appliance.model.decoder import Decoder

CPU_DEVICE = torch.device("cpu")
CUTS = ([7, 1, 9, 20, 1, 1, 6], [1] * 45)
FEWER_STEPS = [*[1] * 6, 25, *[1] * 6, 8]  # more single tokens than a convolution has taps


@pytest.fixture(scope="module", params=RECURRENT)
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Any:
    model_type, settings = RECURRENT[request.param]
    return make_model(model_type, **SIZES | settings)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def by_torch(folder: Path, backend: Backend = REFERENCE) -> Decoder:
    return load_decoder(open_model(folder), backend, CPU_DEVICE, torch.float32)


def by_transformers(model: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    assert logits.std() > 0.5  # the logits vary
    return logits


@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=["reference", "cpu"])
def test_torch_decoder_equals_transformers_however_a_prompt_is_cut(
    model: Any, backend: Backend, folder: Path, token_ids: list[int]
) -> None:
    decoder = by_torch(folder, backend)
    expected = by_transformers(model, token_ids)
    for chunks in ([45], CUTS[0], FEWER_STEPS):
        logits = logits_in_steps(decoder, token_ids, chunks)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_library_equals_transformers_and_no_bit_depends_on_the_cut(
    model: Any, isa: Isa, folder: Path, token_ids: list[int]
) -> None:
    assert why_unsupported(open_model(folder)) is None
    whole = logits_in_steps(native(folder), token_ids, [45])
    torch.testing.assert_close(whole, by_transformers(model, token_ids), atol=1e-4, rtol=0)
    shared_out = native(folder, threads=3)
    for chunks in CUTS:
        assert torch.equal(logits_in_steps(shared_out, token_ids, chunks), whole), chunks


@pytest.mark.parametrize("load", [by_torch, native], ids=["torch", "library"])
def test_sequences_in_a_step_keep_states_of_their_own(
    load: Callable[[Path], Any], folder: Path, token_ids: list[int]
) -> None:
    """One continues, one begins in a used slot, one has a single row."""
    decoder = load(folder)
    sequences = [token_ids, token_ids[::-1], token_ids[5:38]]
    alone = [logits_in_steps(decoder, tokens, [len(tokens)]) for tokens in sequences]
    cache = allocate(decoder, num_blocks=12, num_states=5)
    tables = [(9, 0, 4), (2, 11, 3), (7, 1, 8)]
    first, second, third = (
        Running(tokens, table, slot)
        for tokens, table, slot in zip(sequences, tables, (4, 0, 2), strict=True)
    )
    advance(decoder, cache, [(first, 30), (second, 17)])
    others = cache.states[[1, 3]].clone()
    together = advance(decoder, cache, [(second, 1), (first, 4), (third, 33)])
    expected = [alone[1][17:18], alone[0][30:34], alone[2]]
    exact = load is native
    for found, wanted in zip(together, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=0 if exact else 1e-4, rtol=0)
    assert arrays.equal(cache.states[[1, 3]], others)


@pytest.mark.parametrize("load", [by_torch, native], ids=["torch", "library"])
def test_a_copied_slot_goes_on_as_the_first_did(
    load: Callable[[Path], Any], folder: Path, token_ids: list[int]
) -> None:
    """Fork, checkpoint and swap do the same: copy one row of the states."""
    decoder = load(folder)
    whole = logits_in_steps(decoder, token_ids, [32, 13])
    cache = allocate(decoder, num_blocks=4, num_states=3)
    running = Running(token_ids, (0, 1), slot=0)
    advance(decoder, cache, [(running, 32)])
    cache.states[2] = cache.states[0]
    advance(decoder, cache, [(running, 13)])
    fork = Running(token_ids, (0, 1), slot=2, computed=32)
    (again,) = advance(decoder, cache, [(fork, 13)])
    torch.testing.assert_close(again, whole[32:], atol=1e-5, rtol=0)
    assert arrays.equal(cache.states[2], cache.states[0])


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "lfm2",
            {"conv_L_cache": 5},
            r"conv\.weight has shape .*\(64, 1, 5\) with conv_L_cache = 5, hidden",
        ),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache is 1"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "none of 3 layers has attention"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "layer_types = .*full_attention and"),
        (
            "qwen3_5",
            {"linear_num_value_heads": 5},
            "linear_num_value_heads = 5 .*multiple of linear_num_key_heads, 2",
        ),
        ("qwen3_5", {"linear_value_head_dim": 64}, r"in_proj_qkv\.weight has shape \(416, 64\)"),
        (
            "qwen3_5",
            {"linear_conv_kernel_dim": 3},
            r"conv1d\.weight .*linear_conv_kernel_dim = 3, .*in config\.json",
        ),
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'"),
        (
            "qwen3_5",
            {"layer_types": ["linear_attention"]},
            "layer_types must list as many layers as num_hidden_layers says, 3",
        ),
    ],
)
def test_state_sizes_that_do_not_fit_are_refused_by_name(
    name: str, change: dict[str, Any], said: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, settings = RECURRENT[name]
    make_model(model_type, **SIZES | settings).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=said) as refused:
        open_model(tmp_path)
    assert "config.json" in str(refused.value)


def test_limits_that_no_step_reaches_are_none(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Makers also write the largest 64-bit number; transformers clamps to it without effect."""
    model_type, settings = RECURRENT["bamba"]
    make_model(model_type, **SIZES | settings).save_pretrained(tmp_path)
    config, unbounded = json.loads((tmp_path / "config.json").read_text()), open_model(tmp_path)
    for limits in ([0.0, 1e308], [0, {"__float__": "Infinity"}], [0.0, math.inf]):
        (tmp_path / "config.json").write_text(json.dumps(config | {"time_step_limit": limits}))
        assert open_model(tmp_path).spec == unbounded.spec
    for others in ([0.0, 0.1], [0.001, 1e308], [0.0], "no"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"time_step_limit": others}))
        with pytest.raises(UnsupportedModelError, match="time_step_limit = "):
            open_model(tmp_path)


def test_the_text_of_a_larger_checkpoint_is_served_without_its_draft(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """Qwen 3.5 comes so: text beside a vision tower, and layers that predict further tokens."""
    model_type, settings = RECURRENT["qwen3_5"]
    model = make_model(model_type, **SIZES | settings)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    whole = {"text_config": config | {"mtp_num_hidden_layers": 1}, "model_type": "qwen3_5"}
    whole["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {
        "model.visual.blocks.0.norm1.weight": torch.zeros(8),
        "mtp.fc.weight": torch.ones(8),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_model(tmp_path)
    assert any("text only: 2 tensors" in note for note in source.weights.notes())
    logits = logits_in_steps(by_torch(tmp_path), token_ids, [45])
    torch.testing.assert_close(logits, by_transformers(model, token_ids), atol=1e-4, rtol=0)
