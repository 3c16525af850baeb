"""Checkpoints of which the text is only a part."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.teacher_forcing import logits_of
from support.models.whole_models import MAKERS_FORMS, WHOLES, MakersForm, whole_model

from appliance.errors import UnsupportedModelError
from appliance.kernels.backend import REFERENCE
from appliance.model.families.registry import family_of_text
from appliance.model.families.text_parts import REFUSED_WHOLES, text_settings
from appliance.model.leftovers import leftovers
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
    # transformers writes these into the files of small models, and nothing reads them.
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


def test_unknown_names_are_said_with_those_that_were_looked_for(
    make_model: Callable[..., Any], save: Callable[[Any], Path], tmp_path: Path
) -> None:
    text = save(make_model("qwen3"))
    whole = as_part(text, tmp_path / "whole", "engine.words.")
    with pytest.raises(UnsupportedModelError) as refused:
        open_model(whole)
    message = str(refused.value)
    for words in ("qwen3 decoder", "model.language_model.embed_tokens.weight", "engine.words."):
        assert words in message
    assert "fetch the model again" not in message
    tensors = load_file(text / "model.safetensors")
    save_file({f"x.{name}": each for name, each in tensors.items()}, text / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"looked for .*stored are x\."):
        open_model(text)


@pytest.mark.parametrize("kind", WHOLES)
def test_the_text_of_a_whole_answers_as_transformers_answers(
    kind: str, save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model = whole_model(kind, WHOLES[kind])
    source = open_model(save(model))
    assert source.fallback is None
    assert_answers_as(model, source, token_ids)


def assert_answers_as(model: Any, source: ModelSource, token_ids: list[int]) -> None:
    # Llama 4's image class runs only with images.
    run = model.language_model if model.config.model_type == "llama4" else model
    with torch.no_grad():
        wanted = run(input_ids=torch.tensor([token_ids])).logits[0].float()
    assert wanted.std() > 0.5  # the logits vary
    found = logits(source, token_ids)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_stacked_experts_are_read_inputs_first_as_their_makers_store_them(
    save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    """Qwen publishes them like this; transformers transposes them at load, and saves them so."""
    model = whole_model("qwen3_vl_moe", WHOLES["qwen3_vl_moe"])
    file = (folder := save(model)) / "model.safetensors"
    turned = {
        name: tensor.mT.contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(turned, file, {"format": "pt"})
    assert_answers_as(model, open_model(folder), token_ids)


def test_a_layer_that_predicts_a_further_token_is_left_out_where_the_class_ignores_it(
    save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model = whole_model("glm_ocr", WHOLES["glm_ocr"])
    file = (folder := save(model)) / "model.safetensors"
    tensors = load_file(file)
    last = [name for name in tensors if ".language_model.layers.2." in name]
    assert last
    tensors |= {name.replace("layers.2.", "layers.3."): tensors[name] + 1 for name in last}
    save_file(tensors, file, {"format": "pt"})
    source = open_model(folder)
    assert leftovers(source) == []
    assert_answers_as(model, source, token_ids)


NO_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "head_dim": 10,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
    },
}


@pytest.mark.parametrize("form", MAKERS_FORMS)
def test_a_text_in_its_makers_own_form_answers_as_alone(
    form: str,
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    kind, stored = MAKERS_FORMS[form]
    model = make_model(kind, tie_word_embeddings=False, **NO_DEFAULTS.get(kind, {}))
    source = open_model(in_form(save(model), stored))
    assert_answers_as(model, source, token_ids)
    assert [note for note in source.weights.notes() if f"only: {len(stored.beside)} tens" in note]


def in_form(text: Path, form: MakersForm) -> Path:
    """Turn a text model's checkpoint into that of a whole model in its makers' form."""
    settings = json.loads((text / "config.json").read_text()) | form.settings
    whole: dict[str, Any] = {"architectures": ["WholeForConditionalGeneration"], **form.whole}
    if form.section:
        for key in form.section[::-1]:
            settings = {key: settings}
    else:
        del settings["model_type"], settings["architectures"]
    (text / "config.json").write_text(json.dumps(settings | whole))
    tensors = {}
    for name, tensor in load_file(text / "model.safetensors").items():
        first, _, rest = name.partition(".")
        tensors[f"{form.head}.weight" if first == "lm_head" else form.layers + rest] = tensor
    tensors |= {name: torch.zeros(8, 8) for name in form.beside}
    save_file(tensors, text / "model.safetensors", {"format": "pt"})
    return text


@pytest.mark.parametrize("kind", REFUSED_WHOLES)
def test_a_whole_whose_text_does_not_stand_alone_is_refused_with_the_reason(kind: str) -> None:
    config = {"model_type": kind, "text_config": {"model_type": "llama"}}
    with pytest.raises(UnsupportedModelError, match=f"model_type '{kind}' cannot be served: "):
        text_settings(config)


def test_a_whole_that_transformers_lets_write_no_text_is_refused() -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    writing: set[str] = set()
    for task in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        writing |= getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").keys()
    texts = {
        kind: CONFIG_MAPPING[kind].sub_configs_defaults.get("text_config")
        for kind in CONFIG_MAPPING
    }
    served = {
        kind
        for kind, text in texts.items()
        if text is not None and family_of_text({"model_type": text.model_type}) is not None
    }
    assert served - writing - REFUSED_WHOLES.keys() == set()


def test_a_whole_of_several_folders_names_the_one_to_serve() -> None:
    with pytest.raises(UnsupportedModelError, match="serve its folder llm"):
        text_settings({"model_type": "llava_llama", "llm_cfg": {"model_type": "llama"}})


def test_a_text_part_of_another_kind_is_refused(
    make_model: Callable[..., Any], save: Callable[[Any], Path], tmp_path: Path
) -> None:
    text = save(make_model("gemma4_text", **SMALL))
    whole = as_part(text, tmp_path / "whole", "model.language_model.", model_type="stranger")
    with pytest.raises(UnsupportedModelError, match="text part of model_type 'stranger'"):
        open_model(whole)
