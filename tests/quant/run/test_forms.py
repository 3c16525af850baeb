"""Every form of weights that a person can request, written to a folder and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.errors import ConfigError
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.source import open_model
from appliance.quant.formats.scheme import Fp4Scheme, Fp8Scheme, WeightScheme
from appliance.quant.methods import fp8, rtn
from appliance.quant.run.options import Method, QuantizeOptions, choose_scheme
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText

MakeFolder = Callable[..., Path]
ODD = {"intermediate_size": 200}
WHOLE_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def groups_of(folder: Path) -> list[dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return list(config["config_groups"].values())


@pytest.mark.parametrize("scheme", [Fp8Scheme(), Fp8Scheme(blockwise=True)], ids=str)
def test_fp8_comes_back_as_it_was_made(
    make_llama: MakeFolder, tmp_path: Path, scheme: Fp8Scheme
) -> None:
    source = open_model(make_llama(**(WHOLE_BLOCKS if scheme.blockwise else ODD)))
    report = quantize_model(source.path, tmp_path / "out", QuantizeOptions(scheme, Method.FP8))
    result = open_model(report.out)
    for slot in source.slots():
        before, after = source.weights.load(slot.name), result.weights.load(slot.name)
        assert isinstance(before, torch.Tensor)
        if slot.is_linear:
            assert isinstance(after, Fp8Weight)
            assert torch.equal(after.dequantize(), fp8.quantize(before, scheme).dequantize())
    assert 8 <= report.quantized_bits_per_weight < 8.5


def test_blocks_that_would_be_cut_become_channels(make_llama: MakeFolder, tmp_path: Path) -> None:
    options = QuantizeOptions(Fp8Scheme(blockwise=True), Method.FP8)
    report = quantize_model(make_llama(**ODD), tmp_path / "out", options)
    (group,) = groups_of(report.out)
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == (
        "channel",
        "token",
    )
    assert "FP8 by channel" in report.scheme
    assert any("q_proj.weight of 96x96" in note for note in report.notes)


@pytest.mark.parametrize("method", [Method.MXFP4, Method.NVFP4])
def test_4_bit_floats_come_back_in_groups_of_their_own(
    model: Path, text: Path, tmp_path: Path, method: Method
) -> None:
    scheme = choose_scheme(method, None, None, symmetric=True)
    rows = CalibrationText(text, num_tokens=96, row_tokens=48)
    report = quantize_model(model, tmp_path / "out", QuantizeOptions(scheme, method, rows))
    result = open_model(report.out)
    linears = [slot.name for slot in result.slots() if slot.is_linear]
    for name in linears:
        weight = result.weights.load(name)
        assert isinstance(weight, Fp4Weight), name
        assert weight.group_size == (32 if method is Method.MXFP4 else 16)
    (group,) = groups_of(report.out)
    assert group["format"] == f"{method.value}-pack-quantized"
    assert (group["targets"], group["input_activations"]) == (["Linear"], None)
    sides = (0.25, 0.1) if method is Method.MXFP4 else (0.5, 0.2)
    assert 4 + sides[0] <= report.quantized_bits_per_weight < 4 + sides[0] + sides[1]


def test_three_bits_take_three_on_disk_and_come_back_as_four(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    scheme = WeightScheme(3, 32, symmetric=False)
    source = open_model(make_llama())
    report = quantize_model(source.path, tmp_path / "out", QuantizeOptions(scheme))
    name = "model.layers.0.mlp.down_proj.weight"
    before, after = source.weights.load(name), open_model(report.out).weights.load(name)
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, PackedWeight)
    assert after.bits == 4
    assert int(after.unpack().max()) <= 7
    assert torch.equal(after.dequantize(), rtn.quantize(before, scheme).dequantize())
    assert report.quantized_bits_per_weight == pytest.approx(3.6, abs=0.05)


def test_a_head_of_its_own_is_quantized_alone_or_with_the_embedding(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    source = make_llama()
    for embedding in (16, 4):
        options = QuantizeOptions(WeightScheme(4, 32), head=8, embedding=embedding)
        report = quantize_model(source, tmp_path / f"out{embedding}", options)
        weights = open_model(report.out).weights
        head, ends = weights.load(HEAD), weights.load(EMBEDDING)
        assert isinstance(head, PackedWeight)
        assert head.bits == 8
        assert isinstance(ends, PackedWeight) == (embedding == 4)
        targets = [group["targets"] for group in groups_of(report.out)]
        assert ["lm_head"] in targets
        assert ["Linear"] not in targets


def test_the_matrix_of_both_ends_is_stored_as_the_embedding(
    make_llama: MakeFolder, tmp_path: Path
) -> None:
    source = make_llama(tie_word_embeddings=True)
    scheme = WeightScheme(8, 32)
    options = QuantizeOptions(scheme, head=8)
    report = quantize_model(source, tmp_path / "out", options)
    result = open_model(report.out)
    matrix = result.weights.load(EMBEDDING)
    assert isinstance(matrix, PackedWeight)
    before = open_model(source).weights.load(EMBEDDING)
    assert isinstance(before, torch.Tensor)
    assert torch.equal(matrix.dequantize(), rtn.quantize(before, scheme).dequantize())
    assert "model.embed_tokens" in groups_of(report.out)[0]["targets"]
    assert any("vLLM do not read a quantized embedding" in note for note in report.notes)
    with pytest.raises(ConfigError, match="its head too"):
        quantize_model(source, tmp_path / "no", QuantizeOptions(embedding=8))


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "scheme"),
    [
        ("rtn", None, None, WeightScheme(4, 64)),
        ("gptq", 3, "128", WeightScheme(3, 128)),
        ("int8", None, None, WeightScheme(8, None)),
        ("int8", 8, "32", WeightScheme(8, 32)),
        ("fp8", None, None, Fp8Scheme()),
        ("fp8", 8, "block", Fp8Scheme(blockwise=True)),
        ("mxfp4", 4, "32", Fp4Scheme(has_powers=True)),
        ("nvfp4", None, None, Fp4Scheme()),
    ],
)
def test_what_is_left_out_follows_from_the_method(
    method: str, bits: int | None, group_size: str | None, scheme: object
) -> None:
    assert choose_scheme(Method.parse(method), bits, group_size, symmetric=True) == scheme


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "symmetric", "said"),
    [
        ("fp8", 4, None, True, "leave --bits 4 out"),
        ("int8", 4, None, True, "leave --bits 4 out"),
        ("fp8", None, "64", True, "not one of FP8"),
        ("fp8", None, None, False, "no zero points"),
        ("rtn", 4, "block", True, "not 32, 64, 128 or channel"),
        ("nvfp4", 8, None, True, "leave --bits 8 out"),
        ("nvfp4", None, "32", True, "groups of 16 .*leave --group-size 32 out"),
        ("mxfp4", None, None, False, "leave --no-symmetric out"),
    ],
)
def test_what_does_not_go_together_is_refused(
    method: str, bits: int | None, group_size: str | None, symmetric: bool, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_scheme(Method.parse(method), bits, group_size, symmetric=symmetric)


@pytest.mark.parametrize("head", [3, 5, 32])
def test_other_bits_of_a_head_are_refused(
    make_llama: MakeFolder, tmp_path: Path, head: int
) -> None:
    with pytest.raises(ConfigError, match="use 4, 8 or 16"):
        quantize_model(make_llama(), tmp_path / "out", QuantizeOptions(head=head))
