"""Quantizing from a GGUF file of every type, and writing the result as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from support.gguf.ggml_models import write_llama

from appliance.errors import QuantizeError
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.weight import dense
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.gguf.repack import write_gguf
from appliance.quant.methods import rtn
from appliance.quant.run.options import QuantizeOptions
from appliance.quant.run.pipeline import quantize_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = (*GGML_TYPES, "MXFP4", "Q4_0", "Q4_1", "Q8_0")
    return write_llama(tmp_path_factory.mktemp("base") / "base.gguf", types)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    source = open_model(path)
    return {
        slot.name: dense(source.weights.load(slot.name), torch.float32) for slot in source.slots()
    }


@pytest.mark.parametrize("scheme", [WeightScheme(4, 32), WeightScheme(8, 32)], ids=str)
def test_every_type_is_a_base_and_the_result_is_written_without_loss(
    base: Path, tmp_path: Path, scheme: WeightScheme
) -> None:
    folder, file = tmp_path / "folder", tmp_path / "out.gguf"
    quantize_model(base, folder, QuantizeOptions(scheme))
    exact, quantized = weights_of(base), weights_of(folder)
    linear = "model.layers.1.mlp.down_proj.weight"
    expected = rtn.quantize(exact[linear], scheme).dequantize()
    torch.testing.assert_close(quantized[linear], expected, atol=1e-6, rtol=0)

    written = write_gguf(folder, file, base)
    kind = "Q4_0" if scheme.bits == 4 else "Q8_0"
    assert written.types == {kind: 21, "F32": 7, "BF16": 1}
    found = weights_of(file)
    assert found.keys() == quantized.keys()
    for name, weight in found.items():  # scales below 2 ** -17 are rounded to float16's steps
        torch.testing.assert_close(weight, quantized[name], atol=128 * 2**-25, rtol=0)

    reader = gguf.GGUFReader(file)
    stored = {tensor.name: tensor for tensor in reader.tensors}["blk.1.ffn_down.weight"]
    assert stored.tensor_type.name == kind
    assert np.array_equal(dequantize(stored.data, stored.tensor_type), found[linear].numpy())
    lengths = [
        one.fields["llama.context_length"].contents() for one in (reader, gguf.GGUFReader(base))
    ]
    assert lengths == [128, 128]
    with pytest.raises(QuantizeError, match=r"out.gguf exists.*--overwrite"):
        write_gguf(folder, file, base)


def test_a_base_of_another_model_is_refused_before_anything_is_written(
    base: Path, tmp_path: Path
) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other.gguf"
    quantize_model(base, folder, QuantizeOptions(WeightScheme(4, 32)))
    write_llama(other, ["Q8_0"], tied=False)
    with pytest.raises(QuantizeError, match=r"--base .*other.gguf has tensors of other shapes"):
        write_gguf(folder, tmp_path / "out.gguf", other)
    with pytest.raises(QuantizeError, match=r"--base .*none.gguf is no GGUF file"):
        write_gguf(folder, tmp_path / "out.gguf", tmp_path / "none.gguf")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
