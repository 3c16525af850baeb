"""Grids of GGML's types, read back by the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor

from appliance.errors import ConfigError
from appliance.kernels.weights.ggml import GgmlWeight
from appliance.quant.formats.ggml_blocks import encode, row_bytes
from appliance.quant.formats.ggml_forms import FORMS, BlockScheme
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import gptq
from appliance.quant.methods.block_grids import choose_blocks
from appliance.quant.methods.descent import descend
from appliance.quant.methods.fp4_grids import Fp4Grid
from appliance.quant.methods.ranges import choose_grid

TYPES = [BlockScheme(name) for name in FORMS]
STEPS = [WeightScheme(3, 32), WeightScheme(4, 64, symmetric=False), WeightScheme(8, None)]


def weights(rows: int = 8, columns: int = 512) -> Tensor:
    """Normal weights; some groups are zero, of one sign, of one value, or have an outlier."""
    found = torch.randn((rows, columns), generator=torch.Generator().manual_seed(1)) * 0.05
    found[0] = 0.0
    found[1, :32] = found[1, :32].abs() + 0.1
    found[2, 32:96] = -found[2, 32:96].abs() - 0.1
    found[3, 256:288] = -0.25
    found[4, 300] = 3.0
    return found


def moments(columns: int = 512) -> Tensor:
    """Mean of x x^T of inputs that depend on each other."""
    mixed = torch.randn((columns, columns), generator=torch.Generator().manual_seed(3))
    seen = torch.randn((700, columns), generator=torch.Generator().manual_seed(4)) @ mixed * 0.05
    return seen.T @ seen / len(seen)


@pytest.mark.parametrize("scheme", TYPES, ids=str)
@pytest.mark.parametrize("is_searched", [False, True], ids=["whole", "searched"])
def test_the_stored_blocks_give_the_weights_of_the_codes(
    scheme: BlockScheme, is_searched: bool
) -> None:
    values = weights()
    grid = choose_blocks(values, scheme, is_searched=is_searched)
    codes = grid.codes(values)
    packed = grid.pack(codes)
    if isinstance(packed, GgmlWeight):
        blocks = packed.blocks.flatten(1)
    else:
        blocks = encode("w", packed, scheme.type_name)
    kind = gguf.GGMLQuantizationType[scheme.type_name]
    assert blocks.shape[1] == row_bytes(scheme.type_name, 512)
    read = torch.from_numpy(dequantize(blocks.numpy(), kind))
    torch.testing.assert_close(read, grid.weights(codes), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(packed.dequantize(), grid.weights(codes), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scheme", TYPES, ids=str)
def test_a_search_loses_less_than_whole_ranges(scheme: BlockScheme) -> None:
    values = weights(64)[8:]
    importance = torch.rand(512, generator=torch.Generator().manual_seed(2)) + 0.01

    def lost(*, is_searched: bool) -> float:
        grid = choose_blocks(values, scheme, importance=importance, is_searched=is_searched)
        return float(((grid.weights(grid.codes(values)) - values).square() * importance).sum())

    assert lost(is_searched=True) < 0.97 * lost(is_searched=False)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_lose_less_than_the_gguf_packages(name: str) -> None:
    values = weights(64)[8:]
    kind = gguf.GGMLQuantizationType[name]
    plain = torch.from_numpy(dequantize(gguf.quants.quantize(values.numpy(), kind), kind))
    grid = choose_blocks(values, BlockScheme(name))
    ours = grid.weights(grid.codes(values))
    assert float((ours - values).square().sum()) < 0.95 * float((plain - values).square().sum())


@pytest.mark.parametrize("scheme", TYPES, ids=str)
def test_gptq_rounds_to_the_grid_that_is_stored(scheme: BlockScheme) -> None:
    values, hessian = weights(32), moments()
    result = gptq.quantize(values, hessian, scheme)
    grid = choose_blocks(values, scheme, importance=hessian.diagonal())
    rounded = grid.weights(grid.codes(values))
    loss = gptq.output_loss(values, result.weight.dequantize(), hessian)
    assert loss < 0.8 * gptq.output_loss(values, rounded, hessian)


@pytest.mark.parametrize("scheme", [*TYPES, *STEPS], ids=str)
def test_each_sweep_lowers_the_error_and_stays_on_the_grid(
    scheme: BlockScheme | WeightScheme,
) -> None:
    values, square = weights(32), moments()
    grid = choose_grid(values, scheme, torch.bfloat16)
    assert not isinstance(grid, Fp4Grid)
    codes = grid.codes(values)
    lost = [gptq.output_energy(values - grid.weights(codes), square)]
    for _ in range(2):
        grid, codes = descend(values, grid, codes, square, sweeps=1)
        lost.append(gptq.output_energy(values - grid.weights(codes), square))
    assert lost[1] < 0.9 * lost[0]
    assert lost[2] < lost[1]
    stored = grid.pack(codes).dequantize()
    torch.testing.assert_close(stored, grid.weights(codes), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "smaller"),
    [
        ("Q2_K", "IQ4_NL"),
        ("Q3_K", "IQ4_NL"),
        ("IQ4_XS", "IQ4_NL"),
        ("Q4_K", "Q5_0"),
        ("Q5_K", "Q5_1"),
        ("Q6_K", "Q8_0"),
    ],
)
def test_widths_without_super_blocks_get_smaller_blocks(name: str, smaller: str) -> None:
    scheme = BlockScheme(name)
    assert scheme.fit(512) == (scheme, "")
    found, why = scheme.fit(576)
    assert found == BlockScheme(smaller)
    assert why == f"as {smaller}, not {name}: 576 inputs do not divide by 256"
    assert scheme.fit(80) == (None, "kept in 16 bits: 80 inputs do not divide by 32")


def test_a_type_that_is_not_written_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'IQ3_S' is not written here; use Q4_0, .*IQ4_XS"):
        BlockScheme("IQ3_S")
