"""A calibrated KV plan, written and read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.model.source import open_model
from appliance.quant.formats.kv_plan import FILE, read_plan, to_json
from appliance.quant.kv.calibrate import calibrate_kv


def test_a_plan_comes_back_as_it_was_written(tiny_llama: Path, tmp_path: Path) -> None:
    rows = torch.randint(3, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    plan = calibrate_kv(open_model(tiny_llama), rows, tmp_path, torch.device("cpu"), 7.0)
    assert plan.bits <= 7.0
    first = replace(plan.layers[0], key_factors=torch.arange(1.0, 33).view(2, 16))
    plan = replace(plan, layers=(first, *plan.layers[1:]))
    (tmp_path / FILE).write_text(json.dumps(to_json(plan.layers, plan.bits)))
    heads = [(2, 16), (2, 16)]
    read = read_plan(tmp_path, heads)
    assert read is not None
    for ours, theirs in zip(plan.layers, read, strict=True):
        assert ours.format is theirs.format
        assert ours.head_scales is not None
        assert theirs.head_scales is not None
        torch.testing.assert_close(ours.head_scales, arrays.in_torch(theirs.head_scales))
        assert (ours.key_mean is None) == (theirs.key_mean is None)
    assert read[0].key_factors is not None
    assert torch.equal(arrays.in_torch(read[0].key_factors), torch.arange(1.0, 33).view(2, 16))
    with pytest.raises(CheckpointError, match="of another model"):
        read_plan(tmp_path, heads[:1])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_plan(tmp_path, [(2, 16), (3, 16)])
    (tmp_path / FILE).write_text('{"version": 2}')
    with pytest.raises(CheckpointError, match="newer appliance"):
        read_plan(tmp_path, heads)
