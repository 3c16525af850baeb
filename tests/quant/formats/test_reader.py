"""The reader of a folder, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.weights.packed import PackedWeight
from appliance.model_files.checkpoint import SafetensorsFolder, read_config, write_safetensors
from appliance.quant.formats import open_weights
from appliance.quant.formats.compressed_tensors import encode
from appliance.quant.formats.compressed_tensors_config import quantization_config
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.rtn import quantize

NAME = "model.layers.0.mlp.up_proj.weight"
SCHEME = WeightScheme(4, 32)
WEIGHT = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


def folder(path: Path, tensors: dict[str, torch.Tensor], quantization: object) -> SafetensorsFolder:
    config = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    write_safetensors(path / "model.safetensors", tensors)
    return SafetensorsFolder(path)


def packed_folder(path: Path, *, without: str = "none") -> SafetensorsFolder:
    tensors = encode(NAME, quantize(WEIGHT, SCHEME), SCHEME) | {"model.norm.weight": torch.ones(6)}
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(without)}
    return folder(path, kept, quantization_config({NAME.removesuffix(".weight"): SCHEME}, []))


def test_plain_tensors_come_as_they_are(tmp_path: Path) -> None:
    reader = open_weights(folder(tmp_path, {NAME: WEIGHT.bfloat16()}, None))
    assert reader.tensor_names() == [NAME]
    assert reader.shape(NAME) == (6, 64)
    loaded = reader.load(NAME)
    assert isinstance(loaded, torch.Tensor)
    assert torch.equal(loaded, WEIGHT.bfloat16())


def test_packed_tensors_come_under_the_name_of_their_weight(tmp_path: Path) -> None:
    reader = open_weights(packed_folder(tmp_path))
    assert reader.tensor_names() == [NAME, "model.norm.weight"]
    assert reader.shape(NAME) == (6, 64)
    loaded = reader.load(NAME)
    assert isinstance(loaded, PackedWeight)
    assert torch.equal(loaded.dequantize(), quantize(WEIGHT, SCHEME).dequantize())
    assert reader.shape("model.norm.weight") == (6,)
    assert isinstance(reader.load("model.norm.weight"), torch.Tensor)


def test_bits_are_known_before_a_weight_is_read(tmp_path: Path) -> None:
    reader = open_weights(packed_folder(tmp_path))
    assert reader.packed_bits(NAME) == 4
    assert reader.packed_bits("model.norm.weight") is None


def test_nothing_in_a_plain_folder_is_packed(tmp_path: Path) -> None:
    reader = open_weights(folder(tmp_path, {NAME: WEIGHT}, None))
    assert reader.packed_bits(NAME) is None


@pytest.mark.parametrize("shape", [(48,), (6, 9), (5, 8), (6, 8, 1)])
def test_words_that_cannot_be_the_matrix_are_refused(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    words = torch.zeros(shape, dtype=torch.int32)
    tensors = encode(NAME, quantize(WEIGHT, SCHEME), SCHEME) | {NAME + "_packed": words}
    config = quantization_config({NAME.removesuffix(".weight"): SCHEME}, [])
    reader = open_weights(folder(tmp_path, tensors, config))
    with pytest.raises(CheckpointError, match="does not hold a matrix"):
        reader.packed_bits(NAME)


@pytest.mark.parametrize("part", ["_scale", "_shape"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    reader = open_weights(packed_folder(tmp_path, without=part))
    with pytest.raises(CheckpointError, match=f"{NAME}{part} is missing"):
        reader.load(NAME)


@pytest.mark.parametrize("shape", [[6], [6, 64, 1], [0, 64], [-6, 64]])
def test_an_impossible_shape_is_refused(tmp_path: Path, shape: list[int]) -> None:
    tensors = encode(NAME, quantize(WEIGHT, SCHEME), SCHEME) | {
        NAME + "_shape": torch.tensor(shape)
    }
    config = quantization_config({NAME.removesuffix(".weight"): SCHEME}, [])
    reader = open_weights(folder(tmp_path, tensors, config))
    with pytest.raises(CheckpointError, match="no shape of a matrix"):
        reader.shape(NAME)


@pytest.mark.parametrize(
    ("quantization", "called"),
    [
        ({"quant_method": "eetq"}, "EETQ"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "exl2"}, "ExLlamaV2"),
        ({"group_size": 64, "bits": 4}, "MLX"),
        ({"quant_method": "gptneo"}, "'gptneo'"),
        ({}, "{}"),
        ("gptq", "'gptq'"),
        (["fp8"], "'fp8'"),
    ],
)
def test_other_methods_are_refused_by_name_with_what_to_do(
    tmp_path: Path, quantization: object, called: str
) -> None:
    named = f"by .*{called}.* cannot be read; supported are unquantized weights, comp.*; take the"
    with pytest.raises(UnsupportedModelError, match=named):
        open_weights(folder(tmp_path, {NAME: WEIGHT}, quantization))


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"packing_format": "auto_round", "data_type": "fp8_e5m2"}, "data_type 'fp8_e5m2'"),
        ({"packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"}, "8 bits of data"),
        ({"packing_format": "auto_round:auto_awq"}, "8 bits"),
    ],
)
def test_what_auto_round_packs_otherwise_is_refused_by_name(
    tmp_path: Path, quantization: dict[str, object], named: str
) -> None:
    settings = {"quant_method": "auto-round", "bits": 8, "group_size": 32} | quantization
    with pytest.raises(UnsupportedModelError, match=f"{named}.* appliance quantize"):
        open_weights(folder(tmp_path, {NAME: WEIGHT}, settings))


@pytest.mark.parametrize(
    ("method", "key", "value"),
    [
        ("compressed-tensors", "transform_config", {"config_groups": {"u": {"apply": []}}}),
        ("auto-round", "rotation_config", {"hadamard_type": "quarot"}),
        ("gptq", "rotation", "hadamard"),
    ],
)
def test_weights_for_rotated_inputs_are_refused(
    tmp_path: Path, method: str, key: str, value: object
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} = .*rotations while the model runs"):
        open_weights(folder(tmp_path, {NAME: WEIGHT}, {"quant_method": method, key: value}))


@pytest.mark.parametrize("part", [".qweight", ".weight_scale", ".weight_packed", ".SCB"])
def test_quantized_weights_without_settings_name_the_files_that_have_them(
    tmp_path: Path, part: str
) -> None:
    tensors = {NAME.removesuffix(".weight") + part: WEIGHT}
    with pytest.raises(UnsupportedModelError, match=f"up_proj{part} is a part .*hf_quant_config"):
        open_weights(folder(tmp_path, tensors, None))


def test_settings_in_config_json_win_over_those_of_a_file_beside(tmp_path: Path) -> None:
    """vLLM does so; MLX's `quantization` comes last."""
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 2}))
    gptq, other = {"quant_method": "gptq", "bits": 4}, {"bits": 8, "group_size": 64}
    for config, expected in (
        ({"quantization_config": gptq, "compression_config": {"format": "dense"}}, gptq),
        ({"text_config": {"quantization_config": gptq}, "quantization": other}, gptq),
        ({"compression_config": gptq, "quantization": other}, gptq),
        ({"quantization": other}, other | {"quant_method": "mlx"}),
        ({"quantization_config": None}, {"quant_method": "gptq", "bits": 2}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_config(tmp_path)["quantization_config"] == expected


def test_quanto_is_known_by_the_file_that_it_writes(tmp_path: Path) -> None:
    """optimum-quanto 0.2.7 writes a map of modules, and no settings in config.json."""
    where = folder(tmp_path, {NAME + "._data": torch.zeros(4, 4, dtype=torch.int8)}, None).path
    (where / "quanto_qmap.json").write_text(
        json.dumps({NAME.removesuffix(".weight"): {"weights": "qint8", "activations": "none"}})
    )
    with pytest.raises(UnsupportedModelError, match="quantized by Quanto cannot be read"):
        open_weights(SafetensorsFolder(where))
