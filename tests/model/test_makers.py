"""Families that transformers has no class of, against relatives of the same arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from makers_models import MAKERS, save_as_maker
from native_models import native
from teacher_forcing import logits_of

from appliance.kernels.backend import CPU, REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from appliance.kernels.operations import Backend


@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("case", MAKERS)
def test_a_makers_folder_answers_as_its_relative(
    case: str,
    backend: Backend,
    make_model: Callable[..., Any],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    maker = MAKERS[case]
    model = make_model(maker.relative, **maker.settings)
    source = open_model(save_as_maker(case, model, tmp_path))
    decoder = load_decoder(source, backend, torch.device("cpu"), torch.float32)
    if maker.head is not None:
        model.lm_head.weight.data = maker.head(model.lm_head.weight.data)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    # A head of unit lengths says little, in small numbers.
    size = float(expected.std()) if maker.head is not None else 1.0
    assert expected.std() > 0.5 * size > 0.001
    found = logits_of(decoder, token_ids) / size
    torch.testing.assert_close(found, expected / size, atol=1e-4, rtol=0)


def test_the_library_divides_by_the_lengths_of_a_head_too(
    make_model: Callable[..., Any], tmp_path: Path, token_ids: list[int]
) -> None:
    maker = MAKERS["bailing"]
    assert maker.head is not None
    model = make_model(maker.relative, **maker.settings, hidden_size=64, num_attention_heads=4)
    save_as_maker("bailing", model, tmp_path)
    model.lm_head.weight.data = maker.head(model.lm_head.weight.data)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    found = logits_of(native(tmp_path), token_ids)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=1e-4, rtol=0)
