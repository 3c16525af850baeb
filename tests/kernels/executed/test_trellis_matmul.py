"""Products with symbols of a trellis on the GPU, and the rotation of their inputs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.kernels.trellis_weights import random_trellis
from support.models.teacher_forcing import logits_of

from appliance.kernels.backend import REFERENCE, select_backend
from appliance.kernels.packed_matmul.launch import TiledLinear, dequantize_rows, prepare_linear
from appliance.kernels.rotation import launch, reference
from appliance.kernels.weights.trellis import BITS, HADAMARD, SIGNS, UNIT
from appliance.model.loader import load_decoder
from appliance.model.size import estimate_weight_bytes
from appliance.model.source import open_model
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.formats.store import TrellisStore
from tests.kernels.executed.multiplying import BF16, FP16, activations, errors_of

TOKEN_IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()
# As for other packed weights; here x is rounded once more instead of the weight.
MORE_THAN_DENSE = 1.5


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 1536), (17, 192)])
def test_inputs_are_rotated(rows: int, width: int, dtype: torch.dtype) -> None:
    x = activations(rows, width, dtype)
    found = launch.rotated(x)
    matrix = torch.from_numpy(SIGNS[:, None] * HADAMARD).double()
    exact = (x.double().unflatten(1, (-1, 64)) @ matrix).flatten(1)
    rounding = 2**-8 if dtype == BF16 else 2**-11
    torch.testing.assert_close(found.double(), exact, rtol=rounding, atol=1e-5)
    torch.testing.assert_close(found, reference.rotated(x), rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("rows", "shape", "biased", "dtype"),
    [
        (1, (64, 64), False, BF16),
        (8, (200, 128), True, FP16),
        (16, (128, 192), False, BF16),
        (17, (576, 256), True, BF16),
        (33, (128, 320), False, FP16),
        (70, (256, 512), True, BF16),
    ],
)
def test_it_multiplies_as_its_values_do(
    rows: int, shape: tuple[int, int], biased: bool, dtype: torch.dtype, bits: int
) -> None:
    weight = random_trellis(bits, shape, seed=rows)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(1)) if biased else None
    x = activations(rows, shape[1], dtype)
    found = prepare_linear(weight, bias, dtype)(x)
    errors = errors_of(found, x, weight.dequantize(torch.float64), bias)
    assert errors.found.mean() <= MORE_THAN_DENSE * errors.dense.mean()
    assert errors.found.max() <= MORE_THAN_DENSE * errors.dense.max()


@pytest.mark.parametrize(("bits", "dtype"), [(2, BF16), (3, FP16), (4, BF16), (5, FP16)])
def test_dense_slices_have_its_values(bits: int, dtype: torch.dtype) -> None:
    weight = random_trellis(bits, (200, 192))
    linear = prepare_linear(weight, None, dtype)
    assert isinstance(linear, TiledLinear)
    found = torch.empty(136, 192, dtype=dtype)
    dequantize_rows(linear.weight, 64, found)
    exact = reference.rotated(weight.dequantize(torch.float64)[64:].float())
    torch.testing.assert_close(found.float(), exact.to(dtype).float(), rtol=2**-7, atol=1e-6)


def test_a_model_says_what_it_says_on_the_reference(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "coded")
    (file,) = folder.glob("*.safetensors")
    tensors, store = load_file(file), TrellisStore()
    for seed, name in enumerate(sorted(name for name in tensors if "_proj.weight" in name)):
        outputs, inputs = tensors.pop(name).shape
        bits = BITS[seed % len(BITS)]
        weight = random_trellis(bits, (outputs, inputs), seed)
        scale = torch.full((outputs,), 1 / (UNIT[bits] * inputs**0.5), dtype=torch.bfloat16)
        tensors |= store.encode(name, replace(weight, scale=scale), TrellisScheme(bits))
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    schemes = {str(bits): TrellisScheme(bits) for bits in BITS}
    settings = store.config(schemes, [], named=False)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    source, cpu = open_model(folder), torch.device("cpu")
    coded = load_decoder(source, select_backend(torch.device("cuda")), cpu, BF16)
    exact = load_decoder(source, REFERENCE, cpu, torch.float32)
    planned = estimate_weight_bytes(source, torch.device("cuda"), BF16)
    assert coded.weight_bytes <= planned <= 1.01 * coded.weight_bytes
    said, expected = (logits_of(one, TOKEN_IDS).log_softmax(-1) for one in (coded, exact))
    assert expected.std() > 0.5
    assert (expected.exp() * (expected - said)).sum(-1).mean() < 0.002
