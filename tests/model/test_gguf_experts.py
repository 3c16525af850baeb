"""GGUF files of the families with experts, under the names that gguf's own tables give."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.gguf.gguf_files import known_name, write_gguf_file
from support.models.expert_models import EXPERTS
from support.models.teacher_forcing import logits_of

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.families.registry import FAMILIES
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.size import estimate_native_bytes
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from appliance.model.source import ModelSource

CPU_DEVICE = torch.device("cpu")
SIZES = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4}
OF_EXPERTS = {
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
}
# llama.cpp decides what an architecture's files cannot state.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "mixtral": ("llama", {}),
    "qwen2_moe": ("qwen2moe", {"decoder_sparse_step": 1}),
    "glm4_moe": ("glm4moe", {}),
    "gpt_oss": ("gpt-oss", {"swiglu_limit": 7.0}),
}


def metadata(config: Any) -> dict[str, Any]:
    found = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(16 * config.rope_parameters.get("partial_rotary_factor", 1.0)),
    }
    if config.model_type == "gpt_oss":
        found |= {
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rope_parameters["factor"],
            "rope.scaling.original_context_length": 32,
        }
    for key, names in OF_EXPERTS.items():
        values = [value for name in names if (value := getattr(config, name, None)) is not None]
        found |= {key: values[0]} if values else {}
    return found


def stacked(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """A checkpoint's tensors, with the experts merged as llama.cpp's converter merges them."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if config.model_type == "gpt_oss" and ".experts." in name:
            found |= in_halves(name, tensor)
            continue
        match = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            is_mixtral = config.model_type == "mixtral"
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            part = name.split(".")[-2]
            if is_mixtral and part in heads:  # from the two halves of a head to pairs
                pairs = tensor.reshape(heads[part], 2, -1, tensor.shape[1]).swapaxes(1, 2)
                tensor = pairs.reshape(tensor.shape)
            found[name] = tensor
            continue
        layer, number, part = match.groups()
        merged = f"{layer}.mlp.experts.{part}.weight"
        if part.startswith("w"):
            merged = f"{layer.removeprefix('model.')}.feed_forward.experts.{part}.weight"
        experts.setdefault(merged, {})[int(number)] = tensor
    for name, parts in experts.items():
        found[name] = torch.stack([parts[number] for number in range(len(parts))])
    return found


def in_halves(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """gpt-oss's experts in llama.cpp's layout: gate and up separate, outputs first."""
    module, suffix = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    if suffix == "weight":
        tensor = tensor.transpose(1, 2)
    if "gate_up" not in module:
        return {f"{module}.{suffix}": tensor}
    gate, up = tensor[:, 0::2], tensor[:, 1::2]
    parts = {"gate_proj": gate, "up_proj": up}
    return {f"{module.replace('gate_up_proj', part)}.{suffix}": parts[part] for part in parts}


def write_gguf(
    folder: Path, model: Any, architecture: str, *, quantize: str | None = None, **changes: Any
) -> Path:
    model.save_pretrained(folder / "original")
    config, found = model.config, {}
    for name, tensor in stacked(load_file(folder / "original/model.safetensors"), config).items():
        # Converters rename these before they look them up in the table.
        known = name.replace("e_score_correction_bias", "e_score_correction.bias")
        known += ".weight" if name.endswith("sinks") else ""
        found[known_name(known, architecture, config.num_hidden_layers)] = tensor

    def packed(name: str, data: Any) -> Any:
        is_expert = name.endswith("_exps.weight") and data.shape[-1] % 32 == 0
        return gguf.GGMLQuantizationType[quantize] if quantize and is_expert else None

    settings = metadata(config) | changes
    return write_gguf_file(folder / "model.gguf", architecture, settings, found, packed)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> tuple[Any, str]:
    architecture, changes = CASES[request.param]
    model_type, settings = EXPERTS[request.param]
    return make_model(model_type, **SIZES | settings | changes), architecture


def test_a_gguf_file_reads_as_the_checkpoint_it_was_made_from(
    case: tuple[Any, str], tmp_path: Path, token_ids: list[int]
) -> None:
    model, architecture = case
    source = open_model(write_gguf(tmp_path, model, architecture))
    original = open_model(tmp_path / "original")
    assert source.family.model_type == model.config.model_type
    for slot in original.slots():
        theirs, ours = original.weights.load(slot.name), source.weights.load(slot.name)
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    logits = logits_of(load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32), token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_packed_experts_keep_their_codes(
    case: tuple[Any, str], tmp_path: Path, token_ids: list[int]
) -> None:
    """Stacked matrices in a quantized type keep each expert's own rows, in the library too."""
    model, architecture = case
    source = open_model(write_gguf(tmp_path, model, architecture, quantize="Q8_0"))
    original = open_model(tmp_path / "original")
    packed = [slot for slot in source.slots() if source.weights.packed_bits(slot.name) == 8]
    assert {slot.expert for slot in packed} == set(range(len({slot.expert for slot in packed})))
    for slot in packed:
        weight = source.weights.load(slot.name)
        assert isinstance(weight, PackedWeight)
        kind = gguf.GGMLQuantizationType.Q8_0
        dense = original.weights.load(slot.name)
        assert isinstance(dense, torch.Tensor)
        codes = gguf.quants.quantize(dense.numpy(), kind)
        assert torch.equal(
            weight.dequantize(), torch.from_numpy(gguf.quants.dequantize(codes, kind))
        )
    exact = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    ours = load_native(source, NativeEngine(load_library(), 2), torch.float32)
    expected, found = logits_of(exact, token_ids), logits_of(ours, token_ids)
    # The library rounds activations, which may flip a close choice of experts for a token.
    errors = (found - expected).pow(2).mean(dim=-1).sqrt() / expected.std()
    assert errors.median() < 0.02, errors
    alone = logits_of(ours, token_ids, chunks=[1] * len(token_ids))
    assert torch.equal(alone, found)


def test_names_that_ollama_gives_to_gpt_oss_are_known(
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ollama/ollama's convert_gptoss.go does so, and omits that its scaling is YaRN."""
    original = write_gguf_file
    names = {"attn_output.": "attn_out.", "sinks.weight": "sinks", "post_attention_": "ffn_"}

    def write(path: Path, _: str, settings: dict[str, Any], tensors: Any, *others: Any) -> Path:
        del settings["rope.scaling.type"]
        found = {}
        for name, tensor in tensors.items():
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            found[name] = tensor
        return original(path, "gptoss", settings, found, *others)

    monkeypatch.setitem(globals(), "write_gguf_file", write)
    model_type, settings = EXPERTS["gpt_oss"]
    model = make_model(model_type, **SIZES | settings | {"swiglu_limit": 7.0})
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    source = open_model(write_gguf(tmp_path, model, "gpt-oss"))
    decoder = load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32)
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=1e-4)


def test_experts_in_mxfp4_are_those_of_the_packed_checkpoint(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    """Both files have the same codes and scales, and give the same bits in the library."""
    model_type, settings = EXPERTS["gpt_oss"]
    model = make_model(model_type, **SIZES | settings | {"swiglu_limit": 7.0})
    source = open_model(write_gguf(tmp_path, model, "gpt-oss", quantize="MXFP4"))
    folder = open_model(as_mxfp4(tmp_path / "original", tmp_path / "packed", source))
    packed = [slot for slot in source.slots() if source.weights.float_bits(slot.name) == 4]
    assert len(packed) == 3 * 3 * 6  # matrices of the experts of each layer
    for slot in packed:
        theirs, ours = folder.weights.load(slot.name), source.weights.load(slot.name)
        assert isinstance(theirs, Fp4Weight)
        assert isinstance(ours, Fp4Weight)
        assert torch.equal(theirs.codes, ours.codes)
        assert torch.equal(theirs.scale.view(torch.uint8), ours.scale.view(torch.uint8))
    engine = NativeEngine(load_library(), 2)
    native = load_native(folder, engine, torch.float32)
    assert native.weight_format == "fp32 + mxfp4, head fp32"
    found = logits_of(native, token_ids)
    assert torch.equal(found, logits_of(load_native(source, engine, torch.float32), token_ids))
    assert torch.equal(found, logits_of(native, token_ids, chunks=[1] * len(token_ids)))
    expected = logits_of(load_decoder(folder, REFERENCE, CPU_DEVICE, torch.float32), token_ids)
    errors = (found - expected).pow(2).mean(dim=-1).sqrt() / expected.std()
    assert errors.median() < 0.02, errors
    assert native.weight_bytes <= estimate_native_bytes(folder, torch.float32) * 1.05


def as_mxfp4(original: Path, folder: Path, source: ModelSource) -> Path:
    """Write a checkpoint in OpenAI's form: experts in 16-byte blocks, gate and up interleaved."""
    folder.mkdir()
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(original / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count = tensors.pop(name).shape[0]
        module, _, linear = name.rpartition(".")
        blocks, scales = [], []
        for expert in range(count):
            parts = ["gate_proj", "up_proj"] if linear == "gate_up_proj" else ["down_proj"]
            weights = [source.weights.load(f"{module}.{expert}.{part}.weight") for part in parts]
            halves = [w for w in weights if isinstance(w, Fp4Weight)]
            codes = torch.stack([half.codes for half in halves], dim=1).flatten(0, 1)
            scale = torch.stack([half.scale.view(torch.uint8) for half in halves], dim=1)
            blocks.append(codes.unflatten(1, (-1, 16)))
            scales.append(scale.flatten(0, 1))
        tensors[f"{name}_blocks"] = torch.stack(blocks)
        tensors[f"{name}_scales"] = torch.stack(scales)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("count", [7, 9])
def test_a_stack_of_another_number_of_experts_is_refused(
    count: int, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    architecture, changes = CASES["qwen3_moe"]
    model_type, settings = EXPERTS["qwen3_moe"]
    model = make_model(model_type, **SIZES | settings | changes)
    path = write_gguf(tmp_path, model, architecture, expert_count=count)
    with pytest.raises(
        CheckpointError, match=rf"model\.gguf: .*ffn_gate_inp\.weight .*\({count}, 64\)"
    ):
        open_model(path)


def test_a_gating_function_of_another_kind_is_refused(
    make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, settings = EXPERTS["glm4_moe"]
    model = make_model(model_type, **SIZES | settings)
    path = write_gguf(tmp_path, model, "glm4moe", expert_gating_func=1)
    with pytest.raises(UnsupportedModelError, match="expert_gating_func = 1 is not supported"):
        open_model(path)


def test_each_architecture_is_one_familys_with_and_without_experts() -> None:
    keys = [(f.gguf.architecture, f.gguf.is_of) for f in FAMILIES if f.gguf is not None]
    assert len(keys) == len(set(keys))
