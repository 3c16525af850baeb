"""Experts that a checkpoint stores in one tensor, inputs first, are read in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from expert_models import save_experts

from appliance.checkpoint import SafetensorsFolder
from appliance.model.source import open_model
from appliance.quant.walk.pieces import WeightPieces

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def test_a_matrix_with_inputs_first_is_read_once_for_all_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_experts("gpt_oss", tmp_path)
    weights = open_model(tmp_path).weights
    names = [n for n in weights.tensor_names() if ".experts.2." in n and n.endswith("weight")]
    wholes = [weights.load(name) for name in names]
    read: list[str] = []
    load_part = SafetensorsFolder.load_part

    def counted(folder: SafetensorsFolder, name: str, *place: int) -> Tensor:
        read.append(name)
        return load_part(folder, name, *place)

    monkeypatch.setattr(SafetensorsFolder, "load_part", counted)
    for name, whole in zip(names, wholes, strict=True):
        assert isinstance(whole, torch.Tensor)
        pieces = WeightPieces(weights, name)
        found = [pieces.rows(slice(at, at + 8)) for at in range(0, whole.shape[0], 8)]
        assert len(found) > 3
        assert torch.equal(torch.cat(found), whole.float())
    assert len(read) == len(set(read)) == 6, "gate and up of a layer are one matrix"
