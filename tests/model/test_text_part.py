"""Checkpoints of which the text is only a part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from teacher_forcing import logits_of

from appliance.errors import UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.source import ModelSource, open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU_DEVICE = torch.device("cpu")
SMALL = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
}


def as_part(text: Path, folder: Path, prefix: str, **changes: Any) -> Path:
    """Write a text model's checkpoint as the text part of a larger one."""
    folder.mkdir()
    settings = json.loads((text / "config.json").read_text())
    architecture = settings.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    config = {
        "architectures": [architecture],
        "model_type": "larger",
        "text_config": settings | changes,
        "vision_config": {"hidden_size": 8},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", prefix, 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    tensors["model.vision_tower.encoder.layers.0.mlp.weight"] = torch.zeros(8, 8)
    # As transformers, the files of small models have these, and nothing reads them.
    tensors[f"{prefix}layers.2.self_attn.k_proj.weight"] = torch.zeros(8, 8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits(source: ModelSource, token_ids: list[int]) -> torch.Tensor:
    return logits_of(load_decoder(source, REFERENCE, CPU_DEVICE, torch.float32), token_ids)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_answers_as_alone_and_says_what_is_left_out(
    prefix: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    tmp_path: Path,
    token_ids: list[int],
) -> None:
    text = save(make_model("gemma4_text", **SMALL))
    source = open_model(as_part(text, tmp_path / "whole", prefix))
    assert torch.equal(logits(source, token_ids), logits(open_model(text), token_ids))
    assert source.config["architectures"] == ["Gemma4ForCausalLM"]
    notes = [note for note in source.weights.notes() if "text only: 1 tensors" in note]
    assert len(notes) == 1


def test_a_text_part_of_another_kind_is_refused(
    make_model: Callable[..., Any], save: Callable[[Any], Path], tmp_path: Path
) -> None:
    text = save(make_model("gemma4_text", **SMALL))
    whole = as_part(text, tmp_path / "whole", "model.language_model.", model_type="stranger")
    with pytest.raises(UnsupportedModelError, match="text part of model_type 'stranger'"):
        open_model(whole)
