"""Families with recurrent layers against transformers in float32, in both executors."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.native_models import native
from support.models.recurrent_models import (
    DELTA,
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
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.state_format import StateFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.model.executor import state_views
from appliance.model.loader import load_decoder
from appliance.model.native import why_unsupported
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from appliance.model.spec import STATE_ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from appliance.kernels.cpu.structs import Isa
    from appliance.kernels.operations import Backend
    from appliance.model.decoder import Decoder
    from appliance.model.source import ModelSource

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


def kept_in(folder: Path, kept: StateFormat) -> ModelSource:
    source = open_model(folder)
    return replace(source, spec=replace(source.spec, state_format=kept))


@pytest.mark.parametrize("kept", [StateFormat.FP16, StateFormat.BF16])
def test_states_of_16_bits_take_half_and_are_rounded_behind_each_step_alone(
    model: Any, isa: Isa, folder: Path, token_ids: list[int], kept: StateFormat
) -> None:
    source = kept_in(folder, kept)
    by_library = load_native(source, NativeEngine(load_library(), 3), torch.float32)
    of_torch = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    # A state that ends behind the prompt is read by no row, so nothing of it was rounded.
    whole = by_transformers(model, token_ids)
    found = logits_in_steps(by_library, token_ids, [45])
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)
    kept_slots = []
    for decoder in (by_library, of_torch):
        cache = decoder.allocate_cache(KVFormat.FP32, num_blocks=4, block_size=32, num_states=3)
        tensors = sum(len(mixer.state) for mixer in source.spec.recurrent_layers.values())
        numbers = sum(
            math.prod(shape)
            for mixer in source.spec.recurrent_layers.values()
            for shape in mixer.state
        )
        assert 0 <= cache.states.nbytes - 3 * 2 * numbers <= 3 * tensors * STATE_ALIGNMENT
        running = Running(token_ids, (0, 1), slot=1)
        advance(decoder, cache, [(running, 30)])
        rows = torch.as_tensor(cache.states.numpy().copy())
        kept_slots.append(state_views(source.spec, rows))
        (last,) = advance(decoder, cache, [(running, 15)])
        torch.testing.assert_close(last, whole[30:], atol=0.3, rtol=0)
        assert not torch.equal(last, found[30:]), "the state between the steps was rounded"
    for ours, theirs in zip(*(sum(views, ()) for views in kept_slots), strict=True):
        assert ours.dtype == kept.dtype
        two_steps = 2 * torch.finfo(kept.dtype).eps
        torch.testing.assert_close(ours[1].float(), theirs[1].float(), rtol=two_steps, atol=2e-3)


def test_answers_with_states_of_16_bits_do_not_depend_on_the_batch(
    folder: Path, token_ids: list[int]
) -> None:
    source = kept_in(folder, StateFormat.FP16)
    decoder = load_native(source, NativeEngine(load_library(), 2), torch.float32)
    alone = logits_in_steps(decoder, token_ids, [30, *[1] * 15])
    cache = allocate(decoder, num_blocks=12, num_states=5)
    first, other = Running(token_ids, (9, 0, 4), 4), Running(token_ids[::-1], (2, 11, 3), 0)
    found = [*advance(decoder, cache, [(other, 17), (first, 30)])[1:]]
    found += [advance(decoder, cache, [(other, 1), (first, 1)])[1] for _ in range(15)]
    assert torch.equal(torch.cat(found), alone)


def test_the_library_leaves_wide_heads_in_16_bits_to_torch(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    settings = DELTA | {"linear_num_value_heads": 2, "linear_key_head_dim": 272}
    make_model("qwen3_5_text", **SIZES | settings).save_pretrained(tmp_path)
    assert why_unsupported(open_model(tmp_path)) is None
    reason = why_unsupported(kept_in(tmp_path, StateFormat.FP16))
    assert reason is not None
    assert "heads of 272 elements" in reason
    assert "--mamba-cache-dtype fp32" in reason


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
