"""How much outputs matter is what transformers' classes and torch's derivatives say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.models.model_families import write_family
from transformers import AutoModelForCausalLM

from appliance.model.source import open_model
from appliance.quant.walk.slopes import Slopes

CPU = torch.device("cpu")
ROW = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(3))


def expected_squares(folder: Path) -> dict[str, torch.Tensor]:
    """Compute the mean square over all tokens that may be drawn, by transformers' own classes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocab = model.config.vocab_size
    sums: dict[str, torch.Tensor] = {}
    kept: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            sums[f"{name}.weight"] = torch.zeros(module.out_features)

            def keep(_: object, __: object, y: torch.Tensor, name: str = name) -> None:
                y.retain_grad()
                kept[f"{name}.weight"] = y

            module.register_forward_hook(keep)
    for place in range(len(ROW)):
        # Sequence b scores token b after this place.
        logs = model(ROW.expand(vocab, -1)).logits[:, place].log_softmax(-1)
        logs.diagonal().sum().backward()
        likely = logs[0].detach().exp()
        for name, y in kept.items():
            assert y.grad is not None
            sums[name] += (likely[:, None] * y.grad.square().sum(1)).sum(0)
    return {name: total / len(ROW) for name, total in sums.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_squares_are_those_of_torch(
    make_llama: Callable[..., Path], tmp_path: Path, *, tied: bool
) -> None:
    check_squares(make_llama("base", tie_word_embeddings=tied), tmp_path)


def test_squares_are_of_stored_rows(tmp_path: Path) -> None:
    """Heads that rotate by neighbours are computed in another order of rows."""
    check_squares(write_family("ernie4_5", tmp_path / "base"), tmp_path)


def check_squares(folder: Path, tmp_path: Path) -> None:
    rows = ROW.expand(600, -1).contiguous()  # tokens are drawn anew in each
    found = Slopes(open_model(folder), rows, tmp_path / "slopes", CPU).mean_squares()
    expected = expected_squares(folder)
    assert found.keys() == expected.keys()
    for name, squares in expected.items():
        ratio = found[name] / squares
        assert float(found[name].sum() / squares.sum()) == pytest.approx(1, abs=0.08), name
        assert 0.6 < float(ratio.min()) < float(ratio.max()) < 1.6, name
    assert not (tmp_path / "slopes").exists()
