"""Files of every GGML type as the base of a run."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf.quants import dequantize
from support.gguf.ggml_models import write_llama

from appliance.errors import QuantizeError
from appliance.kernels.weights.packed import PackedWeight
from appliance.kernels.weights.weight import dense
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import rtn
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model
from appliance.quant.text.calibration import CalibrationText

TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
MORE_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# Rows of these keep their order in a Llama's file.
NAMES = {
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    "model.layers.2.mlp.down_proj.weight": "blk.2.ffn_down.weight",
}


@pytest.mark.parametrize("kind", [*TYPES, *MORE_TYPES])
def test_the_weights_of_a_type_are_rounded_as_the_gguf_package_reads_them(
    kind: str, tmp_path: Path
) -> None:
    base = write_llama(tmp_path / "base.gguf", [kind])
    scheme = WeightScheme(8, 32)
    report = quantize_model(base, tmp_path / "out", QuantizeOptions(scheme))
    found = open_model(report.out).weights
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(base).tensors}
    for name, in_file in NAMES.items():
        tensor = stored[in_file]
        assert tensor.tensor_type.name == kind
        exact = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        weight = found.load(name)
        assert isinstance(weight, PackedWeight)
        expected = rtn.quantize(exact, scheme)
        assert torch.equal(weight.codes, expected.codes), name
        assert torch.equal(weight.scale, expected.scale), name


def test_a_calibrated_run_reads_all_types_and_writes_a_file(tmp_path: Path) -> None:
    base = write_llama(tmp_path / "base.gguf", [*TYPES, *MORE_TYPES], tied=False)
    (tmp_path / "text.txt").write_text("ab!cd " * 200)
    chosen = QuantizeOptions.of_type(
        "Q4_K_S",
        method=Method.AWQ_GPTQ,
        text=CalibrationText(tmp_path / "text.txt", num_tokens=192, row_tokens=48),
    )
    report = quantize_model(base, tmp_path / "out", chosen)
    assert {t.tensor_type.name for t in gguf.GGUFReader(report.out).tensors} == {
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "F32",
    }
    assert 0 < max(report.losses.values()) < 0.1


def test_a_file_with_biases_that_no_config_says_becomes_a_file_only(tmp_path: Path) -> None:
    """Qwen 2's config.json has no setting for the bias of attention's output."""
    base = write_llama(
        tmp_path / "base.gguf", ["F16"], architecture="qwen2", biased=("attn_output",)
    )
    scheme = QuantizeOptions(WeightScheme(8, 32))
    with pytest.raises(QuantizeError, match=r"biases that the config.json of a qwen2 .* gguf"):
        quantize_model(base, tmp_path / "out", scheme)
    as_file = QuantizeOptions.of_type("Q8_0")
    report = quantize_model(base, tmp_path / "file", as_file)
    written, stored = open_model(report.out), open_model(base)
    assert written.spec == stored.spec
    name = "model.layers.1.self_attn.o_proj.bias"
    bias = dense(stored.weights.load(name), torch.float32)
    assert torch.equal(dense(written.weights.load(name), torch.float32), bias)
    assert abs(bias).sum() > 0
