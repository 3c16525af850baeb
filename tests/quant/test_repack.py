"""AWQ and GPTQ folders: written by quantize, or from a model that is already quantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from support.quant.exl3_folders import write_exl3
from torch import Tensor

from appliance.errors import ConfigError, QuantizeError
from appliance.kernels.weights.weight import dense
from appliance.model.source import ModelSource, open_model
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats.exl3 import Exl3Weights
from appliance.quant.formats.kv_plan import FILE, SCALE_NAMES
from appliance.quant.formats.scheme import Fp8Scheme, TrellisScheme, WeightScheme
from appliance.quant.formats.store import Weights, awq_writer, gptq_writer
from appliance.quant.gguf.repack import write_gguf
from appliance.quant.quality.facts import facts_of_run, keep_facts
from appliance.quant.repack import repack_model
from appliance.quant.run.options import Method, QuantizeOptions, WeightFormat
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText

MakeFolder = Callable[..., Path]
WORDS = [WeightFormat.AWQ, WeightFormat.GPTQ]


def weights_of(folder: Path) -> dict[str, Tensor]:
    source = open_model(folder)
    return {
        slot.name: dense(source.weights.load(slot.name), torch.float64) for slot in source.slots()
    }


def dense_of(source: ModelSource, name: str) -> Tensor:
    return dense(source.weights.load(name), torch.float64)


def assert_same_weights(one: Path, other: Path) -> None:
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    for name, weight in left.items():
        assert torch.equal(weight, right[name]), name


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config["quantization_config"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("format", WORDS)
def test_a_format_changes_no_weight(
    make_llama: MakeFolder, tmp_path: Path, format: WeightFormat, symmetric: bool
) -> None:
    source = make_llama()
    scheme = WeightScheme(4, 64, symmetric)  # 96 inputs need groups of 32, so all get them
    plain, direct, again = (tmp_path / name for name in ("plain", "direct", "again"))
    quantize_model(source, plain, QuantizeOptions(scheme))
    quantize_model(source, direct, QuantizeOptions(scheme, format=format))
    repack_model(plain, again, format)
    assert_same_weights(plain, direct)
    assert_same_weights(plain, again)
    assert (direct / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    config = config_of(direct)
    assert config == config_of(again)
    assert (config["quant_method"], config["bits"], config["group_size"]) == (format.value, 4, 32)
    if format is WeightFormat.GPTQ:
        assert (config["sym"], config["checkpoint_format"]) == (
            symmetric,
            "gptq" if symmetric else "gptq_v2",
        )
        assert config["dynamic"] == {"-:^lm_head$": {}}
    else:
        assert (config["zero_point"], config["modules_to_not_convert"]) == (True, ["lm_head"])


def test_the_tensors_have_the_names_and_shapes_of_the_format(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    quantize_model(make_llama(), tmp_path / "out", QuantizeOptions(format=WeightFormat.GPTQ))
    folder = SafetensorsFolder(tmp_path / "out")
    module = "model.layers.1.mlp.down_proj"
    shapes = {
        part: folder.shape(f"{module}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
    }
    assert shapes == {
        "qweight": (16, 96),  # 128 inputs, 8 of them in a word
        "qzeros": (4, 12),  # groups of 32, because other linears have 96 inputs
        "scales": (4, 96),
        "g_idx": (128,),
    }
    assert folder.dtype(f"{module}.scales") == "float16"
    assert folder.dtype("lm_head.weight") == "bfloat16"


def test_one_format_is_repacked_into_the_other(make_llama: MakeFolder, tmp_path: Path) -> None:
    scheme = WeightScheme(4, 32, symmetric=False)
    first, second = tmp_path / "first", tmp_path / "second"
    quantize_model(make_llama(), first, QuantizeOptions(scheme, format=WeightFormat.AWQ))
    repack_model(first, second, WeightFormat.GPTQ)
    assert_same_weights(first, second)


@pytest.mark.parametrize("format", WORDS)
def test_three_bits_are_repacked_in_four(
    make_llama: MakeFolder, tmp_path: Path, format: WeightFormat
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    quantize_model(make_llama(), first, QuantizeOptions(WeightScheme(3, 32)))
    repack_model(first, second, format)
    assert_same_weights(first, second)
    assert config_of(second)["bits"] == 4


def test_ends_that_are_quantized_go_back_to_16_bits_and_that_is_said(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    quantize_model(make_llama(), first, QuantizeOptions(WeightScheme(4, 32), head=8))
    (note,) = repack_model(first, second, WeightFormat.GPTQ).notes
    assert note.startswith("lm_head.weight goes from 8 bits back to 16: gptq holds")
    assert SafetensorsFolder(second).dtype("lm_head.weight") == "bfloat16"


@pytest.mark.parametrize("format", WORDS)
def test_what_was_found_for_the_kv_cache_and_how_goes_along(
    model: Path, text: Path, tmp_path: Path, format: WeightFormat
) -> None:
    rows = CalibrationText(text, num_tokens=96, row_tokens=48)
    options = QuantizeOptions(WeightScheme(4, 32), text=rows, kv_bits=8.0)
    first, second = tmp_path / "first", tmp_path / "second"
    facts = keep_facts(quantize_model(model, first, options))
    repack_model(first, second, format)
    before, after = open_model(first), open_model(second)
    assert (second / FILE).read_bytes() == (first / FILE).read_bytes()
    name = f"model.layers.0.{SCALE_NAMES[0]}"
    assert torch.equal(dense_of(before, name), dense_of(after, name))
    assert config_of(second)["kv_cache_scheme"] == config_of(first)["kv_cache_scheme"]
    assert facts_of_run(second) == facts


def test_precisions_that_are_mixed_are_no_format_of_repacking(
    model: Path, text: Path, tmp_path: Path
) -> None:
    rows = CalibrationText(text, num_tokens=96, row_tokens=48)
    options = QuantizeOptions(WeightScheme(4, 32), mixed=5.5, text=rows)
    report = quantize_model(model, tmp_path / "first", options)
    assert report.scheme == "4 bits, groups of 32, symmetric, mixed to 5.5 bits on average"
    with pytest.raises(ConfigError, match="the same for all layers, not 4 and 8"):
        repack_model(tmp_path / "first", tmp_path / "second", WeightFormat.GPTQ)


def test_a_model_that_is_not_quantized_is_refused(make_llama: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="quantize it first"):
        repack_model(make_llama(), tmp_path / "out", WeightFormat.AWQ)
    assert not (tmp_path / "out").exists()


def test_compressed_tensors_is_no_goal_of_repacking(make_llama: MakeFolder, tmp_path: Path) -> None:
    quantize_model(make_llama(), tmp_path / "quantized", QuantizeOptions())
    with pytest.raises(ConfigError, match="--format awq, gptq, gguf or dense"):
        repack_model(tmp_path / "quantized", tmp_path / "out", WeightFormat.COMPRESSED_TENSORS)


@pytest.mark.parametrize(
    "options",
    [QuantizeOptions(WeightScheme(4, 32)), QuantizeOptions(Fp8Scheme(), Method.FP8)],
    ids=["4 bits", "fp8"],
)
def test_weights_of_any_form_are_unpacked_to_16_bits(
    make_llama: MakeFolder, tmp_path: Path, options: QuantizeOptions
) -> None:
    quantize_model(make_llama(), tmp_path / "quantized", options)
    repacked = repack_model(tmp_path / "quantized", tmp_path / "out", None)
    assert (repacked.store, repacked.notes) == (None, ())
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    found = weights_of(tmp_path / "out")
    for name, weight in weights_of(tmp_path / "quantized").items():
        assert torch.equal(found[name], weight.bfloat16().double()), name
    with pytest.raises(QuantizeError, match="no quantized weights"):
        repack_model(tmp_path / "out", tmp_path / "again", None)


def test_a_trellis_goes_to_16_bits_and_is_refused_by_name_elsewhere(
    make_llama: MakeFolder, model: Path, text: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}
    options = QuantizeOptions(
        TrellisScheme(3),
        Method.TRELLIS,
        CalibrationText(text, num_tokens=96, row_tokens=48),
        format=WeightFormat.TRELLIS,
    )
    source = make_llama("other", **sizes)
    copyfile(model / "tokenizer.json", source / "tokenizer.json")
    coded = quantize_model(source, tmp_path / "coded", options).out
    repack_model(coded, tmp_path / "dense", None)
    found = weights_of(tmp_path / "dense")
    for name, weight in weights_of(coded).items():
        assert torch.equal(found[name], weight.bfloat16().double()), name
    for format in WORDS:
        with pytest.raises(QuantizeError, match=r"symbols of a trellis, .*--format dense"):
            repack_model(coded, tmp_path / "no", format)
    with pytest.raises(QuantizeError, match=r"symbols of a trellis, .*--format dense"):
        write_gguf(coded, tmp_path / "no.gguf")
    assert not (tmp_path / "no").exists()


def test_exl3_goes_to_16_bits_as_it_is_meant(make_llama: MakeFolder, tmp_path: Path) -> None:
    coded = write_exl3(make_llama(), tmp_path / "coded", 4)
    repack_model(coded, tmp_path / "dense", None)
    weights = open_model(coded).weights
    assert isinstance(weights, Exl3Weights)
    found = weights_of(tmp_path / "dense")
    for name in ("model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        assert torch.equal(found[name], weights.unpacked(name).bfloat16().double()), name
        assert not torch.equal(found[name], dense_of(open_model(coded), name))


def test_what_a_format_cannot_hold_is_refused_before_any_work(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    options = QuantizeOptions(WeightScheme(8, 32), format=WeightFormat.AWQ)
    with pytest.raises(ConfigError, match=r"--format awq holds 4 bits.*not 8; use"):
        quantize_model(make_llama(), tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_quantized_head_is_for_compressed_tensors_only(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    options = QuantizeOptions(format=WeightFormat.GPTQ, head=8)
    with pytest.raises(ConfigError, match="--format gptq does not hold a quantized"):
        quantize_model(make_llama(), tmp_path / "out", options)


def weights(*parts: tuple[tuple[int, int], WeightScheme]) -> Weights:
    return {f"layer.{index}.weight": part for index, part in enumerate(parts)}


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ([((12, 64), WeightScheme(4, 64))], r"multiples of 8 outputs, but layer\.0\.weight has 12"),
        ([((8, 64), WeightScheme(4, 64)), ((8, 64), WeightScheme(8, 64))], "not 4 and 8; use"),
    ],
)
@pytest.mark.parametrize("writer", [awq_writer, gptq_writer])
def test_refusals_name_what_is_in_the_way(
    writer: Callable[[Weights], object],
    parts: list[tuple[tuple[int, int], WeightScheme]],
    complaint: str,
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        writer(weights(*parts))


def test_groups_are_cut_to_the_largest_that_all_can_have() -> None:
    row, wide = WeightScheme(4, None), WeightScheme(4, 128)
    assert awq_writer(weights(((8, 96), row), ((8, 128), row))).words.group_size is None
    assert awq_writer(weights(((8, 576), row), ((8, 128), wide))).words.group_size == 64
    assert gptq_writer(weights(((8, 256), row), ((8, 128), wide))).words.group_size == 128
