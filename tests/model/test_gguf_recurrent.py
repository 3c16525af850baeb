"""GGUF files of families with recurrent layers, under the names of gguf's own tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from support.gguf.gguf_files import write_gguf_file
from support.gguf.recurrent_files import write_gguf
from support.models.recurrent_models import RECURRENT, SIZES, logits_in_steps

from appliance.errors import CheckpointError
from appliance.gguf import GGUFFile
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


CPU_DEVICE = torch.device("cpu")
# GGUF architecture, and settings that its files can say
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2moe", {"routed_scaling_factor": 1.0}),
    "qwen3_5": ("qwen35", {"full_attention_interval": 2, "layer_types": None}),
    "qwen3_5_moe": ("qwen35moe", {"full_attention_interval": 2, "layer_types": None}),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> tuple[Any, str]:
    architecture, changes = CASES[request.param]
    model_type, settings = RECURRENT[request.param]
    kept = {key: value for key, value in (settings | changes).items() if value is not None}
    return make_model(model_type, **SIZES | kept), architecture


def test_a_gguf_file_reads_as_the_checkpoint_it_was_made_from(
    case: tuple[Any, str], tmp_path: Path, token_ids: list[int]
) -> None:
    model, architecture = case
    source = open_model(write_gguf(tmp_path, model, architecture))
    original = open_model(tmp_path / "original")
    assert source.family.model_type == model.config.model_type
    for slot in original.slots():
        theirs, ours = original.weights.load(slot.name), source.weights.load(slot.name)
        torch.testing.assert_close(ours, theirs, atol=3e-7, rtol=0)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    decoder = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    logits = logits_in_steps(decoder, token_ids, [45])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_packed_weights_keep_their_codes_and_run_in_the_library(
    case: tuple[Any, str], tmp_path: Path, token_ids: list[int]
) -> None:
    """A mixer's values follow the order of its packed columns, whose codes do not move."""
    model, architecture = case
    source = open_model(write_gguf(tmp_path, model, architecture, quantize="Q8_0"))
    packed = [slot for slot in source.slots() if source.weights.packed_bits(slot.name) == 8]
    assert {slot.role.value for slot in packed} >= {"query", "input", "output"}
    weights = [source.weights.load(slot.name) for slot in packed]
    assert all(isinstance(weight, PackedWeight) for weight in weights)
    exact = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    ours = load_native(source, NativeEngine(load_library(), 2), torch.float32)
    expected = logits_in_steps(exact, token_ids, [45])
    found = logits_in_steps(ours, token_ids, [45])
    # The library rounds activations, which may flip a close choice of experts for a token; values
    # in another order would cause errors of 1.
    errors = (found - expected).pow(2).mean(dim=-1).sqrt() / expected.std()
    assert errors.median() < 0.05, errors
    assert torch.equal(logits_in_steps(ours, token_ids, [1] * 45), found)


def test_blocks_that_predict_further_tokens_are_no_layers(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    """Lists include them, as llama.cpp's `recurrent_layers` does, which replaces the interval."""
    architecture, changes = CASES["qwen3_5"]
    kept = {k: v for k, v in (RECURRENT["qwen3_5"][1] | changes).items() if v is not None}
    model = make_model("qwen3_5_text", **SIZES | kept)
    plain = open_model(write_gguf(tmp_path, model, architecture))
    layers = len(plain.spec.layers)
    recurrent = [index in plain.spec.recurrent_layers for index in range(layers)]
    further: dict[str, Any] = {
        "block_count": layers + 1,
        "nextn_predict_layers": 1,
        "attention.recurrent_layers": [*recurrent, False],
        "full_attention_interval": layers + 1,  # the list replaces it
    }
    assert open_model(write_gguf(tmp_path, model, architecture, **further)).spec == plain.spec


def test_floating_point_codes_are_put_into_the_order_of_checkpoints(
    case: tuple[Any, str], tmp_path: Path
) -> None:
    """Rows and columns equal those of the same numbers in float32, as gguf dequantizes MXFP4."""
    model, architecture = case
    path = write_gguf(tmp_path, model, architecture, quantize="MXFP4")
    values = {
        tensor.name: torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }
    settings = {
        key.removeprefix(f"{architecture}."): value
        for key, value in GGUFFile(path).metadata.items()
        if key.startswith(f"{architecture}.")
    }
    plain = open_model(write_gguf_file(tmp_path / "plain.gguf", architecture, settings, values))
    source = open_model(path)
    coded = [slot.name for slot in source.slots() if source.weights.float_bits(slot.name) == 4]
    assert coded
    for name in coded:
        found, expected = source.weights.load(name), plain.weights.load(name)
        assert torch.equal(dense(found, torch.float32), dense(expected, torch.float32)), name


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "head_count_kv is .*list of 3 whole numbers"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0]}, "none of 3 layers has attention"),
        ("lfm2", {"shortconv.l_cache": 5}, r"conv\.weight has shape \(64, 3\).*\(64, 1, 5\)"),
        ("qwen3_5", {"ssm.time_step_rank": 5}, "linear_num_value_heads = 5"),
        ("qwen3_5", {"ssm.state_size": 48}, "attn_qkv.weight has shape"),
        ("qwen3_5", {"ssm.conv_kernel": 1}, "ssm.conv_kernel is 1"),
    ],
)
def test_state_sizes_that_do_not_fit_are_refused_by_name(
    name: str, change: dict[str, Any], said: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    architecture, changes = CASES[name]
    model_type, settings = RECURRENT[name]
    kept = {key: value for key, value in (settings | changes).items() if value is not None}
    path = write_gguf(tmp_path, make_model(model_type, **SIZES | kept), architecture, **change)
    error = CheckpointError if "is " in said or "shape" in said else Exception
    with pytest.raises(error, match=rf"model\.gguf.*{said}"):
        open_model(path)
