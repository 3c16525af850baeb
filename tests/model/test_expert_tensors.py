"""Experts that a checkpoint stores in one tensor, inputs first, are read piece by piece."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.expert_models import save_experts
from support.models.real_headers.quantized import fp8_blocks

from appliance.errors import UnsupportedModelError
from appliance.kernels.weights.weight import dense
from appliance.model.source import open_model
from appliance.model_files.checkpoint import SafetensorsFolder
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


def fp8_by_output(stack: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a stack (experts, inputs, outputs) as FbgemmFp8Llama4TextExperts keeps it."""
    scale = stack.abs().amax(1, keepdim=True) / 448
    codes = (stack / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scale}, codes.float() * scale


def fp8_by_block(stack: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantize a stack (experts, outputs, inputs) as Step's makers publish it."""
    parts, values = zip(*map(fp8_blocks, stack), strict=True)
    whole = {key: torch.stack([each[key] for each in parts]) for key in parts[0]}
    return {key.removeprefix(".weight"): part for key, part in whole.items()}, torch.stack(values)


@pytest.mark.parametrize("family", ["llama4", "step3p7"])
def test_stacks_of_fp8_experts_are_their_codes_times_their_scales(
    family: str, tmp_path: Path
) -> None:
    save_experts(family, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stacks = [name for name, tensor in tensors.items() if tensor.dim() == 3]
    assert stacks
    stored = {name: tensor for name, tensor in tensors.items() if name not in stacks}
    for name in stacks:
        stack = tensors[name].float()
        is_llama = family == "llama4"
        parts, tensors[name] = fp8_by_output(stack) if is_llama else fp8_by_block(stack)
        if is_llama and name.endswith("down_proj"):
            parts["_scale"] = parts["_scale"].mT.contiguous()
        stored |= {name + ending: part for ending, part in parts.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    plain = open_model(tmp_path).weights
    expected = {n: plain.load(n) for n in plain.tensor_names() if ".experts." in n}
    config = json.loads((tmp_path / "config.json").read_text())
    method = {"quant_method": "fbgemm_fp8" if family == "llama4" else "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    save_file(stored, tmp_path / "model.safetensors")
    weights = open_model(tmp_path).weights
    for name, right in expected.items():
        found = weights.load(name)
        assert weights.float_bits(name) == 8
        assert isinstance(right, torch.Tensor)
        torch.testing.assert_close(dense(found, torch.float32), right.float(), atol=1e-6, rtol=1e-5)
    scales = [name for name in stored if name.endswith(("_scale", "_scale_inv"))]
    save_file({k: v for k, v in stored.items() if k not in scales}, tmp_path / "model.safetensors")
    weights = open_model(tmp_path).weights
    with pytest.raises(UnsupportedModelError, match=r"a stack of FP8 experts without .*quantize"):
        weights.load(next(iter(expected)))
