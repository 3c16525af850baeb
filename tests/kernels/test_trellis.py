"""Weights of the trellis format: the documented reader, the CPU library, and what coding costs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.kernels.trellis_weights import random_trellis

import appliance
from appliance.kernels import arrays
from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa, supported_isas
from appliance.kernels.cpu.parts import LibraryLinear, encode_trellis
from appliance.kernels.cpu.weights import WeightPacker
from appliance.kernels.weights.trellis import (
    BITS,
    SIGNS,
    TABLES,
    UNIT,
    TrellisWeight,
    decoded,
    rotated,
    rotated_back,
)
from appliance.quant.methods.trellis import packed

if TYPE_CHECKING:
    from collections.abc import Iterator


# Mean squared errors on a normal source of variance 1: of the best separate codes (Max, 1960), and
# the least of any code, 4 ** -bits.
BEST_SEPARATE = {2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


@pytest.fixture(params=[isa.name.lower() for isa in supported_isas(load_library())])
def engine(request: pytest.FixtureRequest) -> Iterator[NativeEngine]:
    select_isa(load_library(), request.param)
    yield NativeEngine(load_library(), 2)
    select_isa(load_library())


def in_library(engine: NativeEngine, weight: TrellisWeight) -> LibraryLinear:
    arena = Arena()
    return LibraryLinear(engine, WeightPacker(engine, arena, torch.float32).linear(weight), arena)


def documented_reader() -> Any:
    """Compile the reader that docs/trellis.md shows."""
    page = (Path(appliance.__file__).parent / "docs/trellis.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["read_trellis"]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(128, 64), (200, 192)])
def test_documented_reader_reads_the_same(
    tmp_path: Path, bits: int, shape: tuple[int, int]
) -> None:
    weight = random_trellis(bits, shape)
    tensors = {"m.trellis": weight.symbols, "m.trellis_scale": weight.scale}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"signs": SIGNS.astype(int).tolist(), "tables": {str(bits): TABLES[bits]}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    read = documented_reader()(tmp_path, "model.safetensors", "m")
    assert np.abs(read - weight.dequantize().numpy()).max() < 1e-6


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(64, 64), (192, 576), (200, 128)])
def test_library_multiplies_and_finds_rows(
    engine: NativeEngine, bits: int, shape: tuple[int, int]
) -> None:
    weight = random_trellis(bits, shape)
    linear, dense = in_library(engine, weight), weight.dequantize()
    ids = torch.tensor([0, 63, shape[0] - 1, 17, 16, 1])
    assert torch.allclose(linear.rows(ids), dense[ids], atol=1e-5)
    for rows in (1, 2, 5, 13, 100):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        found, exact = linear(x), x @ dense.T
        assert float((found - exact).norm() / exact.norm()) < 0.01  # of 8-bit activations
        assert torch.equal(linear(x[:1]), found[:1])


@pytest.mark.parametrize("bits", BITS)
def test_coding_loses_less_than_the_best_separate_codes(engine: NativeEngine, bits: int) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(3)) * UNIT[bits]
    symbols, values = encode_trellis(engine, bits, x, torch.ones(x.shape))
    in_order = packed(symbols.flatten().view(1, -1), bits)
    assert torch.equal(decoded(in_order).flatten(), values.flatten().int())
    error = float(((x - values) / UNIT[bits]).square().mean())
    assert 4.0**-bits < error < 0.75 * BEST_SEPARATE[bits]


@pytest.mark.parametrize("bits", BITS)
def test_errors_go_where_they_count_less(engine: NativeEngine, bits: int) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(4)) * UNIT[bits]
    counts = torch.tensor([1.0, 9.0]).repeat(32).expand(x.shape)
    alike, weighed = (
        float((counts * (x - encode_trellis(engine, bits, x, w)[1]).square()).mean())
        for w in (torch.ones(x.shape), counts)
    )
    # At many bits a code of whole sequences pays the geometric mean of the weights, 3, where
    # separate codes pay the arithmetic one, 5 (reverse water-filling: Gersho and Gray, 1992).
    assert 0.58 < weighed / alike < 0.75


@pytest.mark.parametrize("bits", BITS)
def test_rows_columns_and_blocks_are_those_of_the_whole(bits: int) -> None:
    weight = random_trellis(bits, (200, 192))
    dense = weight.dequantize()
    ids = torch.tensor([199, 3, 64, 64])
    assert torch.equal(weight.dequantize(rows=ids), dense[ids])
    assert torch.equal(weight.dequantize(rows=slice(10, 90)), dense[10:90])
    end = weight.whole_rows(slice(64, None))
    assert end is not None
    assert torch.equal(end.dequantize(), dense[64:])
    assert weight.whole_rows(slice(0, 100)) is None
    assert torch.allclose(weight.columns(64, 192).dequantize(), dense[:, 64:], atol=1e-7)
    start = weight.whole_rows(slice(0, 64))
    assert start is not None
    joined = TrellisWeight.concatenate([start, end])
    assert torch.equal(joined.dequantize(), dense)
    host = TrellisWeight(*(arrays.of_numpy(t.numpy()) for t in (weight.symbols, weight.scale)))
    assert np.allclose(host.dequantize().numpy(), dense.numpy(), atol=1e-7)


def test_rotation_keeps_products() -> None:
    x, w = torch.randn(3, 128), torch.randn(5, 128)
    assert torch.allclose(rotated(x) @ rotated(w).T, x @ w.T, atol=1e-4)
    assert torch.allclose(rotated_back(rotated(x)), x, atol=1e-5)
