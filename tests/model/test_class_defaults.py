"""Settings that are absent, null or changed mean what transformers' classes say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import changed_settings
import class_tables
import pytest
import torch
from centered_models import CENTERED
from dense_models import DENSE
from expert_models import EXPERTS
from recurrent_models import RECURRENT
from relatives import RELATIVES
from teacher_forcing import logits_of

from appliance.errors import ModelError
from appliance.kernels.backend import REFERENCE
from appliance.model.families.registry import FAMILIES
from appliance.model.loader import load_decoder
from appliance.model.source import ModelSource, open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_table_is_what_the_installed_classes_say() -> None:
    assert class_tables.TABLE.read_text() == class_tables.written(class_tables.make())


def test_every_family_is_in_the_table() -> None:
    known = json.loads(class_tables.TABLE.read_text())["classes"]
    # The others say themselves what the class means that lies beside the weights.
    assert {each.model_type for each in FAMILIES if each.defaults is None} <= known.keys()
    assert {
        each.model_type for each in FAMILIES if each.defaults is not None
    } & known.keys() == set()


ALL = DENSE | EXPERTS | RECURRENT | CENTERED | RELATIVES
# A model of each family and of its variants, with settings that are not those of its class.
MODELS = (
    *("llama-yarn-scaled", "mistral-window", "ministral3", "qwen2-window", "qwen3-window-bias"),
    *("gemma3", "gemma4", "gemma4-small", "gemma4-unified", "granite", "phi3-window"),
    *(EXPERTS.keys() - {"qwen3_moe-one", "deepseek_v2", "gemma4"}),
    *(RECURRENT.keys() - {"lfm2-bias", "granite4-dense"}),
    *("opt", "falcon", "falcon-new", "falcon-in-turn"),
    *RELATIVES,
)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
WIDE = {"hidden_size": 96}
# Settings that contradict others when they change: a refusal names the others.
OPPOSED = {
    "enable_moe_block": ["use_double_wide_mlp"],
    "layer_types": ["per_layer_config", "num_kv_shared_layers", "sliding_window"],
    "n_embed": ["num_attention_heads"],
    "num_experts": ["n_routed_experts"],
    "num_local_experts": ["n_routed_experts"],
    "qk_nope_head_dim": ["partial_rotary_factor"],
    "qk_rope_head_dim": ["partial_rotary_factor"],
    "rope_type": ["partial_rotary_factor"],
}
# Without these the defaults of others do not fit the rest: refused by their names.
NEEDED = {"num_experts_per_tok", "topk_group", "rope_type"}
# transformers fails without the first two, and with the last beside no embeddings of layers.
OPEN = {"llama_4_scaling_beta", "rope_type", "num_kv_shared_layers"}


def ours_of(source: ModelSource, token_ids: list[int]) -> torch.Tensor:
    decoder = load_decoder(source, REFERENCE, torch.device("cpu"), torch.float32)
    return logits_of(decoder, token_ids)


def disagreement(
    change: changed_settings.Change,
    theirs: torch.Tensor | None,
    ours: torch.Tensor | None,
    message: str,
) -> str:
    """Say how both differ on a change; empty if they agree, or we refuse it as we may."""
    key = change.key
    names = (key, *OPPOSED.get(key, ()), "tensor ")
    if ours is None and not any(name in message for name in names):
        return f"{change}: refused without its name: {message}"
    if theirs is None:
        fine = ours is None or key in OPEN
        return "" if fine else f"{change}: accepted, and refused by transformers"
    if ours is None:
        fine = change.how == "flip" or "tensor " in message or key in NEEDED
        return "" if fine else f"{change}: refused, and accepted by transformers: {message}"
    same = ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=3e-4, rtol=1e-4)
    return "" if same else f"{change}: other logits"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_changed_setting_means_what_it_means_to_transformers(
    name: str, make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model_type, settings = ALL[name]
    model = make_model(model_type, **(WIDE if name in CENTERED else SIZES) | settings)
    folder, oracle = save(model), changed_settings.Oracle(model, token_ids)
    config = json.loads((folder / "config.json").read_text())
    unchanged = open_model(folder)
    usual = ours_of(unchanged, token_ids)
    expected = oracle.logits(config)
    assert expected is not None
    torch.testing.assert_close(usual, expected, atol=1e-4, rtol=0)
    found, compared = [], 0
    for change in changed_settings.changes(config):
        changed_settings.write(change.config, folder)
        theirs, ours, message = oracle.logits(change.config), None, ""
        try:
            source = open_model(folder)
        except ModelError as error:
            message = str(error)
        else:
            if source.spec == unchanged.spec and theirs is None:
                continue  # without effect here, whatever it is
            ours = usual if source.spec == unchanged.spec else ours_of(source, token_ids)
        compared += theirs is not None and ours is not None
        found.append(disagreement(change, theirs, ours, message))
    assert "\n".join(text for text in found if text) == ""
    assert compared > 6  # not all is refused
