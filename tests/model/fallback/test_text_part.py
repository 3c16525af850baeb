"""Checkpoints with a text part that no native family covers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.fallback_models import FALLBACKS
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of
from support.models.whole_models import FALLBACK_WHOLES, whole_model

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.model.fallback.loader import load_fallback
from appliance.model.fallback.operations import LibraryOperations
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

# The places of a text part's layers and head beside an image encoder.
PLACES = {
    "now": ("model.language_model.", "lm_head."),
    "before": ("language_model.model.", "language_model.lm_head."),
}


def as_part(
    text: Path, place: tuple[str, str], more: dict[str, Tensor] | None = None, **changes: Any
) -> Path:
    """Turn a checkpoint into one of a larger model."""
    settings = json.loads((text / "config.json").read_text())
    del settings["architectures"]
    config = {
        "architectures": ["LargerForConditionalGeneration"],
        "model_type": "larger",
        "text_config": settings | changes,
        "vision_config": {"hidden_size": 8},
    }
    (text / "config.json").write_text(json.dumps(config))
    layers, head = place
    tensors = {
        head + name.removeprefix("lm_head.")
        if name.startswith("lm_head.")
        else layers + name.removeprefix("model."): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    tensors["model.vision_tower.layers.0.mlp.weight"] = torch.zeros(8, 8)
    tensors["vision.embed_tokens.weight"] = torch.zeros(8, 8)
    save_file(tensors | (more or {}), text / "model.safetensors", {"format": "pt"})
    return text


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", ["stablelm", "gemma2-caps"])
def test_the_text_answers_as_transformers_does_and_says_what_is_left_out(
    case: str,
    place: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    model_type, settings = FALLBACKS[case]
    model = make_model(model_type, **settings)
    source = open_model(as_part(save(model), PLACES[place]))
    assert source.fallback is not None
    assert source.fallback.name == type(model).__name__
    operations = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
    found = logits_of(load_fallback(source, operations, torch.float32), token_ids)
    with torch.no_grad():
        wanted = model(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-4 * max(1, float(wanted.std())), rtol=0)
    assert [note for note in source.weights.notes() if "text only: 2 tensors" in note]


@pytest.mark.parametrize("kind", FALLBACK_WHOLES)
def test_the_text_of_a_whole_answers_as_transformers_answers(
    kind: str, save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model = whole_model(kind, FALLBACK_WHOLES[kind])
    source = open_model(save(model))
    assert source.fallback is not None
    operations = LibraryOperations(NativeEngine(LIBRARY, 1), torch.float32)
    found = logits_of(load_fallback(source, operations, torch.float32), token_ids)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(found, wanted, atol=1e-4 * max(1, float(wanted.std())), rtol=0)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert [note for note in source.weights.notes() if "of other parts" in note]


@pytest.fixture
def text(make_model: Callable[..., Any], save: Callable[[Any], Path]) -> Path:
    model_type, settings = FALLBACKS["stablelm"]
    return save(make_model(model_type, **settings))


@pytest.mark.parametrize("kind", ["stranger", "t5", None])
def test_a_text_that_transformers_has_no_causal_class_for_is_refused_with_the_native_families(
    kind: str | None, text: Path
) -> None:
    whole = as_part(text, PLACES["now"], model_type=kind)
    with pytest.raises(UnsupportedModelError, match=f"text part of model_type {kind!r}") as caught:
        open_model(whole)
    assert "choose a model among LlamaForCausalLM, " in str(caught.value)


def test_a_layer_that_the_config_does_not_have_is_named(text: Path) -> None:
    layers, _ = PLACES["now"]
    more = {f"{layers}layers.9.mlp.up_proj.weight": torch.zeros(96, 64)}
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.9\.mlp\.up_proj\.weight has"):
        open_model(as_part(text, PLACES["now"], more))


def test_a_missing_tensor_is_named(text: Path) -> None:
    whole = as_part(text, PLACES["now"], num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.3\.\S+ is missing"):
        open_model(whole)
