"""A budget of bits is spent where it saves most, and the measurement names what matters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.errors import ConfigError
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods.mixed import Choice, choose_precisions, spend

THREE, FOUR, EIGHT = (WeightScheme(bits, 32) for bits in (3, 4, 8))
ROWS = torch.randint(0, 50, (2, 48), generator=torch.Generator().manual_seed(0))
SILENT = "model.layers.1.self_attn.o_proj.weight"


def choices(loss: float, weights: int = 100) -> list[Choice]:
    return [
        Choice(None, 16.0 * weights, 0.0),
        Choice(THREE, 3.5 * weights, 4 * loss),
        Choice(FOUR, 4.5 * weights, loss),
        Choice(EIGHT, 8.5 * weights, loss / 256),
    ]


def test_bits_go_where_they_save_most() -> None:
    picked = spend([choices(0.01), choices(1.0), choices(0.02)], (3.5 + 8.5 + 3.5) / 3)
    assert [choice.scheme for choice in picked] == [THREE, EIGHT, THREE]


def test_no_budget_is_overdrawn_and_none_left_that_could_help() -> None:
    options = [choices(0.1 * (i + 1), 50 + 7 * i) for i in range(6)]
    weights = sum(50 + 7 * i for i in range(6))
    for budget in (3.5, 4.0, 4.6, 6.0, 9.0, 16.0):
        picked = spend(options, budget)
        left = budget * weights - sum(choice.size for choice in picked)
        assert left >= 0
        for choice, others in zip(picked, options, strict=True):
            assert not [o for o in others if o.loss < choice.loss and o.size - choice.size <= left]
    assert [choice.scheme for choice in spend(options, 16.0)] == [None] * 6


@pytest.mark.parametrize("budget", [4.0, 5.0, 6.5])
def test_nearly_as_good_as_trying_everything(budget: float) -> None:
    options = [choices(loss) for loss in (0.03, 0.2, 0.5, 0.07)]
    found = sum(choice.loss for choice in spend(options, budget))
    best = min(
        sum(choice.loss for choice in picked)
        for picked in itertools.product(*options)
        if sum(choice.size for choice in picked) <= budget * 400
    )
    assert found <= 1.5 * best


def test_a_budget_below_the_smallest_precision_is_refused_with_what_that_takes() -> None:
    with pytest.raises(ConfigError, match=r"3\.50 bits"):
        spend([choices(1.0)], 3.0)


def test_a_linear_that_matters_gets_more_bits_and_fused_ones_the_same(
    make_llama: Callable[..., Path],
) -> None:
    usual = open_model(make_llama()).weights.load(SILENT)
    assert isinstance(usual, torch.Tensor)
    source = open_model(make_llama("silent", tensors={SILENT: usual * 0.01}))
    found = choose_precisions(source, ROWS, FOUR, 4.6, torch.bfloat16)
    assert set(found) == {slot.name for slot in source.slots() if slot.is_linear}
    least, most = found[SILENT], found["model.layers.0.self_attn.q_proj.weight"]
    assert most is not None
    assert least is not None
    assert most.bits > least.bits == 3
    for layer in (0, 1):
        prefix = f"model.layers.{layer}."
        assert len({found[prefix + f"self_attn.{part}_proj.weight"] for part in "qkv"}) == 1
        assert found[prefix + "mlp.gate_proj.weight"] == found[prefix + "mlp.up_proj.weight"]
