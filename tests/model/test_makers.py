"""Families that transformers has no class of, against relatives of the same arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from makers_models import MAKERS, save_as_maker
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
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)
