"""Folders of the trellis format: what is written, read, and refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, ConfigError, UnsupportedModelError
from appliance.kernels.weights.trellis import TrellisWeight
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats import open_weights
from appliance.quant.formats.scheme import TrellisScheme
from appliance.quant.formats.store import TrellisStore
from appliance.quant.run.options import Method, WeightFormat, read_asked

FolderOf = Callable[[dict[str, Tensor], object], SafetensorsFolder]
MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"
CONFIG: dict[str, Any] = {"quant_method": "trellis", "version": 1}
SYMBOLS = torch.randint(0, 256, (2, 64, 24), generator=torch.Generator().manual_seed(0))
PARTS = {
    MODULE + ".trellis": SYMBOLS.to(torch.uint8),
    MODULE + ".trellis_scale": torch.linspace(0.001, 0.01, 100).bfloat16(),
}
HEAD = {"lm_head.weight": torch.ones(3, 64).bfloat16()}


def test_a_folder_holds_what_was_written(folder_of: FolderOf) -> None:
    store, scheme = TrellisStore(), TrellisScheme(3)
    weight = TrellisWeight(*PARTS.values())
    tensors = store.encode(NAME, weight, scheme)
    layout = store.layout(NAME, weight.shape, scheme, torch.bfloat16)
    assert {name: (part.dtype, tuple(part.shape)) for name, part in tensors.items()} == layout
    config = store.config({MODULE: scheme}, ["lm_head"], named=False)
    read = open_weights(folder_of(tensors | HEAD, config))
    assert read.tensor_names() == ["lm_head.weight", NAME]
    assert read.shape(NAME) == (100, 64)
    assert (read.packed_bits(NAME), read.packed_bits("lm_head.weight")) == (3, None)
    found = read.load(NAME)
    assert isinstance(found, TrellisWeight)
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert torch.equal(read.load("lm_head.weight"), HEAD["lm_head.weight"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {MODULE + ".trellis": SYMBOLS[:, :, :20].to(torch.uint8)},
        {MODULE + ".trellis": SYMBOLS[:1].to(torch.uint8)},
        {MODULE + ".trellis": SYMBOLS[:, :60].to(torch.uint8)},
        {MODULE + ".trellis": SYMBOLS.to(torch.int32)},
        {MODULE + ".trellis_scale": torch.full((100,), torch.nan).bfloat16()},
    ],
)
def test_damaged_weights_are_refused_by_name(
    folder_of: FolderOf, changed: dict[str, Tensor]
) -> None:
    read = open_weights(folder_of(PARTS | changed | HEAD, CONFIG))
    with pytest.raises(CheckpointError, match=MODULE):
        read.load(NAME)


def test_another_version_is_refused(folder_of: FolderOf) -> None:
    with pytest.raises(UnsupportedModelError, match=r"version 2.*reads version 1"):
        open_weights(folder_of(PARTS | HEAD, CONFIG | {"version": 2}))


def test_method_and_format_go_together() -> None:
    form, method = WeightFormat.TRELLIS, Method.TRELLIS
    found = read_asked(method, None, None, symmetric=None, format=form)
    assert (found.method, found.scheme) == (method, TrellisScheme(4))
    with pytest.raises(ConfigError, match="--format trellis"):
        read_asked(method, 4, None, symmetric=None)
    with pytest.raises(ConfigError, match="--format trellis"):
        read_asked(Method.GPTQ, 4, None, symmetric=None, format=form)
    with pytest.raises(ConfigError, match="--format trellis"):
        read_asked(method, 4, None, symmetric=None, format=WeightFormat.GGUF)
    with pytest.raises(ConfigError, match="leave --group-size 64 out"):
        read_asked(method, 4, "64", symmetric=None, format=form)
    with pytest.raises(ConfigError, match="2, 3, 4 or 5 bits, not 8"):
        read_asked(method, 8, None, symmetric=None, format=form)
