"""The precision of the KV cache: requested, planned, or named by others' checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from appliance.config import EngineConfig
from appliance.engine.load.kv_precision import choose_kv
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.errors import CheckpointError, ConfigError, UnsupportedModelError
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.source import open_model
from appliance.model.spec import NormSpec
from appliance.quant.formats.kv_plan import FILE

CPU = torch.device("cpu")
HEADS, DIM = 2, 16


def choose(
    folder: Path, word: str = "auto", device: torch.device = CPU
) -> tuple[tuple[LayerPrecision, ...], tuple[str, ...]]:
    config = EngineConfig(model=str(folder), kv_cache_dtype=word)
    precision, notes = choose_kv(config, open_model(folder), device, torch.bfloat16, native=False)
    assert precision.kv_layers is not None
    return precision.kv_layers, notes


def planned(folder: Path, formats: list[str], mean: float | None = None) -> Path:
    layer: dict[str, Any] = {"k_scale": [0.1, 0.2], "v_scale": [0.3, 0.4], "errors": {}}
    layer["k_mean"] = None if mean is None else [[mean] * DIM] * HEADS
    layers = [{"format": form, **layer} for form in formats]
    (folder / FILE).write_text(json.dumps({"version": 1, "layers": layers}))
    return folder


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def with_scales(folder: Path, scales: dict[str, list[float]], scheme: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for name, values in scales.items():
        tensors[f"model.layers.{name}"] = torch.tensor(values)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def test_auto_is_the_dtype_of_activations_without_a_plan(model: Path) -> None:
    layers, notes = choose(model)
    assert [layer.format for layer in layers] == [KVFormat.BF16] * 2
    assert not notes


def test_auto_follows_the_plan_layer_by_layer(model: Path) -> None:
    layers, _ = choose(planned(model, ["int4-sealed", "int8"], mean=3.0))
    assert [layer.format for layer in layers] == [KVFormat.INT4_SEALED, KVFormat.INT8]
    assert all(layer.key_mean is not None for layer in layers)


def test_what_is_asked_for_overrides_the_plan_and_takes_its_scales(model: Path) -> None:
    folder = planned(model, ["int4-sealed", "int8"])
    layers, _ = choose(folder, "fp8")
    assert [layer.format for layer in layers] == [KVFormat.FP8] * 2
    assert layers[0].head_scales is not None
    assert layers[0].head_scales.tolist() == torch.tensor([[0.1, 0.2], [0.3, 0.4]]).tolist()
    assert choose(folder, "bf16")[0][0].head_scales is None


def test_a_gpu_follows_a_plan_but_for_the_form_that_it_has_no_kernel_for(model: Path) -> None:
    gpu = torch.device("cuda")
    layers, notes = choose(planned(model, ["int4-sealed", "int8"], mean=3.0), device=gpu)
    assert [layer.format for layer in layers] == [KVFormat.INT4_SEALED, KVFormat.INT8]
    assert all(layer.key_mean is not None for layer in layers)
    assert not notes
    layers, notes = choose(planned(model, ["k8v4", "int4-sealed"]), device=gpu)
    assert [layer.format for layer in layers] == [KVFormat.INT8, KVFormat.INT4_SEALED]
    assert "1 of 2 layers of the KV cache are stored as int8 instead of k8v4" in notes[0]


def test_a_form_without_a_kernel_is_refused_where_it_is_asked_for(model: Path) -> None:
    with pytest.raises(ConfigError, match="k8v4 cannot be had on a GPU"):
        choose(model, "k8v4", device=torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "scheme", "count"),
    [
        ("self_attn.{}_scale", FP8_SCHEME, 1),
        ("self_attn.{}_scale", FP8_SCHEME, HEADS),
        ("self_attn.{0}_proj.{0}_scale", "FP8", 1),  # ModelOpt
        ("self_attn.{}_proj.output_scale", FP8_SCHEME, 1),  # compressed-tensors until August 2024
    ],
)
def test_scales_of_others_are_honoured(model: Path, name: str, scheme: Any, count: int) -> None:
    values = [0.5, 0.25][:count]
    scales = {f"{i}.{name.format(x)}": values for i in range(2) for x in "kv"}
    layers, notes = choose(with_scales(model, scales, scheme))
    assert [layer.format for layer in layers] == [KVFormat.FP8] * 2
    expected = torch.tensor(values).expand(HEADS).tolist()
    assert [layer.head_scales.tolist() for layer in layers if layer.head_scales is not None] == [
        [expected] * 2
    ] * 2
    assert not notes


def test_a_single_scale_counts_for_keys_and_values_and_missing_ones_are_noted(
    model: Path,
) -> None:
    folder = with_scales(model, {"0.self_attn.kv_scale": [0.5]}, FP8_SCHEME)
    layers, notes = choose(folder)
    assert layers[0].head_scales is not None
    assert layers[0].head_scales.tolist() == [[0.5] * HEADS] * 2
    assert layers[1].head_scales is None
    assert "1 of 2 layers have no FP8 scales" in notes[0]


def test_scales_of_another_shape_and_other_schemes_are_refused(model: Path) -> None:
    scales = {f"{i}.self_attn.{x}_scale": [1.0] * 3 for i in range(2) for x in "kv"}
    with pytest.raises(CheckpointError, match="holds 3 scales where 1 or 2"):
        choose(with_scales(model, scales, FP8_SCHEME))
    with pytest.raises(UnsupportedModelError, match="asks for 4 bits of type 'int'"):
        choose(with_scales(model, {}, {"num_bits": 4, "type": "int"}))
    with pytest.raises(UnsupportedModelError, match="asks for NVFP4; only FP8 is read"):
        choose(with_scales(model, {}, "NVFP4"))


def test_a_mixed_plan_is_served_and_named(model: Path) -> None:
    folder = planned(model, ["int4-sealed", "int8"], mean=0.5)
    config = EngineConfig(model=str(folder), threads=1, max_num_seqs=4)
    engine = load_llm_engine(
        config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
    )
    assert engine.info.kv_format == "1 layer int4-sealed, 1 layer int8"
    engine.submit(
        Request(
            request_id="a",
            prompt_token_ids=tuple(range(3, 73)),
            sampling=SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=1),
        )
    )
    tokens = 0
    while engine.has_work:
        tokens += sum(len(delta.token_ids) for delta in engine.step().deltas)
    assert tokens == 120


@pytest.mark.parametrize(
    ("change", "native", "options", "expected"),
    [
        ({}, True, {}, KVFormat.INT8),
        ({}, False, {}, KVFormat.BF16),
        ({}, True, {"dtype": "bfloat16"}, KVFormat.BF16),
        ({}, True, {"kv_cache_dtype": "bf16"}, KVFormat.BF16),
        ({"qkv_bias": True}, True, {}, KVFormat.BF16),
        ({"qk_norm": NormSpec(1e-6)}, True, {}, KVFormat.BF16),
    ],
)
def test_the_cpu_library_keeps_even_keys_in_8_bits_unless_asked_otherwise(
    model: Path, change: Any, native: bool, options: Any, expected: KVFormat
) -> None:
    source = open_model(model)
    layers = tuple(
        replace(layer, mixer=replace(attention, **change))
        for layer, attention in zip(
            source.spec.layers, source.spec.attention_layers.values(), strict=True
        )
    )
    source = replace(source, spec=replace(source.spec, layers=layers))
    config = EngineConfig(model=str(model), **options)
    precision, _ = choose_kv(config, source, CPU, torch.bfloat16, native=native)
    assert precision.kv_format is expected
    assert precision.block_size == 16


def test_blocks_that_the_cpu_library_cannot_serve_keep_the_precision_of_the_model(
    model: Path,
) -> None:
    for size, expected in ((8, "bf16"), (16, "int8")):
        config = EngineConfig(model=str(model), threads=1, block_size=size)
        engine = load_llm_engine(
            config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
        )
        assert engine.info.kv_format == expected
        assert engine.info.block_size == size


def test_only_blocks_that_are_closed_are_larger_where_the_cpu_library_serves(model: Path) -> None:
    for word, size in (("int8", 16), ("int4-rotated", 16), ("fp8", 16), ("int4", 32), ("k8v4", 32)):
        config = EngineConfig(model=str(model), kv_cache_dtype=word)
        precision, _ = choose_kv(config, open_model(model), CPU, torch.bfloat16, native=True)
        assert precision.block_size == size, word
