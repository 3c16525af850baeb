"""Grids of GGML's K types, read back by the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor

from appliance.quant.formats.scheme import SuperBlockScheme, WeightScheme
from appliance.quant.methods import gptq
from appliance.quant.methods.ranges import AROUND, SHRUNK, WHOLE
from appliance.quant.methods.super_blocks import choose_super_blocks

TYPES = [SuperBlockScheme("Q4_K"), SuperBlockScheme("Q6_K")]


def weights(rows: int = 8, columns: int = 512) -> Tensor:
    """Normal weights; some groups are zero, of one sign, of one value, or have an outlier."""
    found = torch.randn((rows, columns), generator=torch.Generator().manual_seed(1)) * 0.05
    found[0] = 0.0
    found[1, :32] = found[1, :32].abs() + 0.1
    found[2, 32:96] = -found[2, 32:96].abs() - 0.1
    found[3, 256:288] = -0.25
    found[4, 300] = 3.0
    return found


@pytest.mark.parametrize("scheme", TYPES, ids=str)
@pytest.mark.parametrize("shares", [WHOLE, AROUND], ids=["whole", "around"])
def test_the_stored_blocks_give_the_weights_of_the_codes(
    scheme: SuperBlockScheme, shares: tuple[float, ...]
) -> None:
    values = weights()
    grid = choose_super_blocks(values, scheme, shares=shares)
    codes = grid.codes(values)
    packed = grid.pack(codes)
    blocks = packed.blocks.flatten(1).numpy()
    read = dequantize(blocks, gguf.GGMLQuantizationType[scheme.type_name])
    torch.testing.assert_close(torch.from_numpy(read), grid.weights(codes), atol=1e-6, rtol=1e-6)
    assert torch.equal(packed.decode().codes + (32 if scheme.symmetric else 0), codes)
    assert torch.equal(packed.dequantize(), grid.weights(codes))


@pytest.mark.parametrize("scheme", TYPES, ids=str)
def test_a_search_is_never_worse_than_whole_ranges(scheme: SuperBlockScheme) -> None:
    values = weights(64)
    importance = torch.rand(512, generator=torch.Generator().manual_seed(2)) + 0.01

    def lost(shares: tuple[float, ...]) -> Tensor:
        grid = choose_super_blocks(values, scheme, importance=importance, shares=shares)
        errors = (grid.weights(grid.codes(values)) - values).square() * importance
        return errors.view(64, -1, 256).sum(-1)

    plain, searched = lost(WHOLE), lost(AROUND)
    assert bool((searched <= plain * (1 + 1e-5)).all())
    assert float(searched[8:].sum()) < 0.9 * float(plain[8:].sum())


def test_four_bits_with_minima_lose_less_than_as_many_without() -> None:
    """Q4_K takes 4.5 bits per weight, as Q4_0 does."""
    values = weights(64)[8:]  # all normal, without special groups
    grid = choose_super_blocks(values, SuperBlockScheme("Q4_K"), shares=AROUND)
    stored = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q4_0)
    plain = torch.from_numpy(dequantize(stored, gguf.GGMLQuantizationType.Q4_0))
    ours = grid.weights(grid.codes(values))
    assert float((ours - values).square().sum()) < 0.85 * float((plain - values).square().sum())


@pytest.mark.parametrize("scheme", TYPES, ids=str)
def test_gptq_rounds_to_the_grid_that_is_stored(scheme: SuperBlockScheme) -> None:
    values = weights(32)
    mixed = torch.randn((512, 512), generator=torch.Generator().manual_seed(3))
    inputs = torch.randn((700, 512), generator=torch.Generator().manual_seed(4)) @ mixed * 0.05
    hessian = inputs.T @ inputs / len(inputs)
    result = gptq.quantize(values, hessian, scheme)
    grid = choose_super_blocks(values, scheme, importance=hessian.diagonal(), shares=SHRUNK)
    rounded = grid.weights(grid.codes(values))
    loss = gptq.output_loss(values, result.weight.dequantize(), hessian)
    assert loss < 0.8 * gptq.output_loss(values, rounded, hessian)
    stored = grid.pack(grid.codes(values)).decode()
    kept = result.weight.decode()  # type: ignore[union-attr]
    assert torch.equal(stored.scale, kept.scale)


@pytest.mark.parametrize(
    ("scheme", "smaller", "reason"),
    [
        (TYPES[0], WeightScheme(4, 32, symmetric=False), "as Q4_1, not Q4_K: 576 inputs"),
        (TYPES[1], WeightScheme(8, 32), "as Q8_0, not Q6_K: 576 inputs"),
    ],
    ids=["Q4_K", "Q6_K"],
)
def test_widths_without_super_blocks_get_smaller_blocks(
    scheme: SuperBlockScheme, smaller: WeightScheme, reason: str
) -> None:
    assert scheme.fit(512) == (scheme, "")
    found, why = scheme.fit(576)
    assert found == smaller
    assert why.startswith(reason)
    assert scheme.fit(80) == (None, "kept in 16 bits: 80 inputs do not divide by 32")
