"""Every tensor of a GGUF file is used: biases are added, fused parts found, others refused by name.

The rules are those of llama.cpp's loader: `create_tensor_qkv` and the optional tensors of each
architecture (src/llama-model.cpp, src/models), and its count of tensors at the end, which refuses a
file with unused tensors. Logits are transformers', with the biases added by hooks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from support.gguf.ggml_models import write_llama
from support.gguf.gguf_conversions import gguf_settings as converted_settings
from support.gguf.gguf_conversions import gguf_tensors as converted_tensors
from support.gguf.gguf_files import write_gguf_file
from support.gguf.gguf_models import gguf_tensors, pairs_from_halves, write_gguf
from support.models.expert_models import EXPERTS
from support.models.native_models import native
from support.models.teacher_forcing import logits_of

from appliance.errors import CheckpointError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.weights.weight import dense
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

SIZES = {"head_dim": 16, "hidden_size": 96}
HEAD = {"attention.key_length": 16, "attention.value_length": 16}
WINDOW = {"sliding_window": 7}
# GGUF architecture, model_type, settings of the model, metadata beyond what all files have
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, HEAD),
    "qwen2": ("qwen2", {}, HEAD),
    "qwen3": ("qwen3", {}, HEAD),
    "gemma3": (
        "gemma3_text",
        WINDOW | {"query_pre_attn_scalar": 16},
        HEAD | {"attention.sliding_window": 7, "rope.freq_base": 1e6},
    ),
}
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
Biased = dict[int, list[str]]  # parts with a bias, by layer
# Each part alone, in one layer alone, and several together.
BIASED: list[Biased] = [
    *({0: [part], 1: [part], 2: [part]} for part in MODULES),
    {2: ["attn_k", "ffn_up"]},
    {1: list(MODULES)},
]


def with_biases(model: Any, architecture: str, biased: Biased) -> dict[str, Tensor]:
    """Add biases to a model's linears by hooks, and to its tensors under their GGUF names."""
    tensors = gguf_tensors(model, architecture)
    generator = torch.Generator().manual_seed(3)
    for layer, parts in biased.items():
        for part in parts:
            module = model.model.layers[layer].get_submodule(MODULES[part])
            bias = torch.randn(module.out_features, generator=generator)
            module.register_forward_hook(partial(added, bias=bias))
            name = f"blk.{layer}.{part}.bias"
            stored = bias
            if architecture == "llama" and part in HEADS:
                stored = pairs_from_halves(bias, getattr(model.config, HEADS[part]))
            tensors[name] = stored + tensors[name] if name in tensors else stored
    return tensors


def added(_module: Any, _inputs: Any, output: Tensor, *, bias: Tensor) -> Tensor:
    return output + bias


def expect_same_logits(path: Path, model: Any, token_ids: list[int]) -> None:
    """Compare both executors with the model."""
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    decoder = load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)
    for found in (logits_of(decoder, token_ids), logits_of(native(path), token_ids)):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("biased", BIASED, ids=lambda biased: "-".join(next(iter(biased.values()))))
@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_bias_of_a_file_is_added(
    architecture: str,
    biased: Biased,
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    model_type, settings, metadata = FAMILIES[architecture]
    model = make_model(model_type, **SIZES | settings)
    tensors = with_biases(model, architecture, biased)
    path = write_gguf(tmp_path / "m.gguf", model, architecture, metadata, tensors=tensors)
    expect_same_logits(path, model, token_ids[:24])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_one_tensor_of_query_key_and_value_is_cut(
    architecture: str, make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model_type, settings, metadata = FAMILIES[architecture]
    model = make_model(model_type, **SIZES | settings)
    parts = ["attn_q", "attn_k", "attn_v"]
    tensors = with_biases(model, architecture, dict.fromkeys(range(3), parts))
    for layer in range(3):
        for kind in ("weight", "bias"):
            own = [tensors.pop(f"blk.{layer}.{part}.{kind}") for part in parts]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = torch.cat(own)
    path = write_gguf(tmp_path / "m.gguf", model, architecture, metadata, tensors=tensors)
    expect_same_logits(path, model, token_ids[:24])


def test_query_key_and_value_may_be_apart_where_they_are_usually_one(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model = make_model("phi3", **SIZES)
    tensors = gguf_tensors(model, "phi3")
    for layer in range(3):
        own = tensors.pop(f"blk.{layer}.attn_qkv.weight").split([96, 32, 32])
        for part, weight in zip(("attn_q", "attn_k", "attn_v"), own, strict=True):
            tensors[f"blk.{layer}.{part}.weight"] = weight
    settings = HEAD | {"attention.sliding_window": 0}
    path = write_gguf(tmp_path / "m.gguf", model, "phi3", settings, tensors=tensors)
    expect_same_logits(path, model, token_ids[:24])


@pytest.mark.parametrize("scaled", [False, True])
def test_nvfp4_is_read_with_the_factors_of_whole_weights(scaled: bool, tmp_path: Path) -> None:
    """llama.cpp applies `.scale` in a generic pass; the result equals gguf's own dequantization."""
    stored = write_llama(tmp_path / "m.gguf", ["NVFP4"], scaled=scaled, tied=False)
    plain = write_llama(tmp_path / "p.gguf", ["NVFP4"], scaled=scaled, tied=False, plain=True)
    source, expected = open_model(stored), open_model(plain)
    for slot in source.slots():
        found = dense(source.weights.load(slot.name), torch.float32)
        assert torch.equal(found, dense(expected.weights.load(slot.name), torch.float32))
    tokens = list(range(3, 20))
    decoders = [
        load_decoder(one, REFERENCE, torch.device("cpu"), torch.float32)
        for one in (source, expected)
    ]
    found, theirs = (logits_of(decoder, tokens) for decoder in decoders)
    torch.testing.assert_close(found, theirs, atol=1e-4, rtol=1e-4)
    assert (logits_of(native(stored), tokens).argmax(-1) == theirs.argmax(-1)).float().mean() > 0.8


def test_both_forms_of_latent_heads_may_be_there(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """ik_llama.cpp's files have the whole linear besides its halves."""
    model_type, settings = EXPERTS["deepseek_v2"]
    model = make_model(model_type, **{"head_dim": 16, "hidden_size": 64} | settings)
    model.save_pretrained(tmp_path / "original", save_original_format=False)
    checkpoint = load_file(tmp_path / "original/model.safetensors")
    tensors = converted_tensors(checkpoint, model.config)
    for layer in range(model.config.num_hidden_layers):
        whole = checkpoint[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = whole
    path = tmp_path / "m.gguf"
    write_gguf_file(path, "deepseek2", converted_settings(model.config), tensors)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    decoder = load_decoder(open_model(path), REFERENCE, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("output.bias", (97,)),
        ("blk.0.attn_sub_norm.weight", (96,)),
        ("blk.1.attn_q.scale", (1,)),
        ("blk.0.attn_q_norm.weight", (16,)),
        ("blk.0.ffn_norm.bias", (96,)),
        ("blk.2.ffn_gate_exps.weight", (2, 76, 96)),
        ("blk.3.attn_norm.weight", (96,)),
        ("token_types.weight", (2, 96)),
        ("rope_factors_short.weight", (8,)),
        ("dense_2.weight", (96, 96)),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    tensor: str, shape: tuple[int, ...], make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_model("llama", **SIZES)
    tensors = gguf_tensors(model, "llama") | {tensor: torch.ones(shape)}
    path = write_gguf(tmp_path / "m.gguf", model, "llama", HEAD, tensors=tensors)
    with pytest.raises(CheckpointError, match=f"{tensor} has no place") as raised:
        open_model(path)
    assert "again" not in str(raised.value)


def test_blocks_beyond_the_count_are_refused_and_unused_tensors_known(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    model = make_model("llama", **SIZES)
    shorter = write_gguf(tmp_path / "short.gguf", model, "llama", HEAD | {"block_count": 2})
    with pytest.raises(CheckpointError, match=r"blk\.2\.attn_k.weight has no place"):
        open_model(shorter)
    unused = {"cls.output.weight": torch.ones(2, 96), "blk.0.attn_q.input_scale": torch.ones(1)}
    tensors = gguf_tensors(model, "llama") | unused
    path = write_gguf(tmp_path / "m.gguf", model, "llama", HEAD, tensors=tensors)
    expect_same_logits(path, model, token_ids[:24])
