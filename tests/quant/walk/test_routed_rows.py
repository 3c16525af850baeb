"""Experts that run one after another compute what the layer computes with all of them at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from support.models.expert_models import save_experts

from appliance.model.experts import Experts
from appliance.model.source import open_model
from appliance.model.spec import ExpertsSpec
from appliance.quant.walk import routed_rows
from appliance.quant.walk.block import Moments, ObservedLinear
from appliance.quant.walk.walk import Walk

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.model.layers import MLP
    from appliance.quant.walk.block import TransformerBlock

CPU = torch.device("cpu")
ROWS = torch.randint(0, 50, (6, 24), generator=torch.Generator().manual_seed(2))


def outputs(walk: Walk, block: TransformerBlock) -> torch.Tensor:
    return torch.cat([walk.run(block, rows) for rows in walk.portions()])


def down(mlp: MLP) -> ObservedLinear:
    assert isinstance(mlp.down, ObservedLinear)
    return mlp.down


FAMILIES = ["qwen3_moe", "qwen2_moe", "glm4_moe", "gemma4", "gpt_oss", "llama4", "llama4-two"]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_one_by_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_rows, "ROWS_AT_ONCE", 5)
    save_experts(family, tmp_path / "model")
    source = open_model(tmp_path / "model")
    walk = Walk(source, ROWS, tmp_path / "work", CPU)
    index = next(
        i for i, layer in enumerate(source.spec.layers) if isinstance(layer.mlp, ExpertsSpec)
    )
    whole = walk.block(index)
    assert isinstance(whole.layer.mlp, Experts)
    seen = [Moments(down(mlp).in_features, CPU) for mlp in whole.layer.mlp.experts]
    for mlp, moments in zip(whole.layer.mlp.experts, seen, strict=True):
        down(mlp).moments = moments
    expected = outputs(walk, whole)
    with walk.routed(index, {}) as kept:
        for number, moments in enumerate(seen):
            assert kept.is_chosen(number) == (moments.tokens > 0)
            mlp = walk.expert(index, number, {})
            found = kept.observe(number, mlp, down(mlp))
            assert found.tokens == moments.tokens
            torch.testing.assert_close(found.hessian, moments.hessian)
            kept.add(number, mlp)
        assert not list((tmp_path / "work").glob("expert*")), "nothing to clean up after a kill"
        before = set(os.listdir("/proc/self/fd"))
        torch.testing.assert_close(outputs(walk, walk.layer(index, {}, kept.summed())), expected)
    assert len(set(os.listdir("/proc/self/fd"))) == len(before) - 2
    with walk.whole(index) as block:
        assert isinstance(block.layer.mlp, Experts)
        assert not block.layer.mlp.experts
        torch.testing.assert_close(outputs(walk, block), expected)
    assert sum(moments.tokens for moments in seen) >= ROWS.numel()


def test_a_layer_without_its_experts_cannot_run_them(tmp_path: Path) -> None:
    save_experts("qwen3_moe", tmp_path / "model")
    walk = Walk(open_model(tmp_path / "model"), ROWS, tmp_path / "work", CPU)
    with pytest.raises(AssertionError, match="did not end before its experts"):
        outputs(walk, walk.layer(0, {}))
