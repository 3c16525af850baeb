"""Absent, null and changed settings mean what transformers' classes say.

APPLIANCE_TEST_CHANGES sets how many random changes of every family are tried, and
APPLIANCE_TEST_CHANGES_SEED which ones; without them some families are tried in turn.
"""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.models import changed_settings, class_tables
from support.models.centered_models import CENTERED
from support.models.changed_settings import Change, with_setting
from support.models.dense_models import DENSE
from support.models.expert_models import EXPERTS
from support.models.random_changes import Judge, random_changes
from support.models.recurrent_models import RECURRENT
from support.models.relatives import FOLDERS, RELATIVES
from support.models.teacher_forcing import logits_of

from appliance.errors import ApplianceError
from appliance.kernels.backend import REFERENCE
from appliance.model.families.registry import CLASSES_OF_TYPES, FAMILIES
from appliance.model.families.standard import OLD_LAYER_KINDS
from appliance.model.loader import load_decoder
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_table_is_what_the_installed_classes_say() -> None:
    assert class_tables.TABLE.read_text() == class_tables.written(class_tables.make())


def test_every_family_is_in_the_table() -> None:
    known = json.loads(class_tables.TABLE.read_text())["classes"]
    # The other families state their class's defaults themselves.
    assert {each.model_type for each in FAMILIES if each.defaults is None} <= known.keys()
    assert {
        each.model_type for each in FAMILIES if each.defaults is not None
    } & known.keys() == set()


def test_types_whose_class_is_that_of_a_family_are_known() -> None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    ours = {name for family in FAMILIES for name in family.architectures}
    configs = transformers.CONFIG_MAPPING
    texts = {kind for kind in configs if "text_config" in configs[kind].sub_configs}
    assert {
        kind: name
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if name in ours
        and kind not in texts
        and getattr(transformers, name).config_class is not configs[kind]
    } == CLASSES_OF_TYPES


def test_old_names_of_layers_are_those_that_transformers_reads() -> None:
    from transformers.configuration_utils import remap_legacy_layer_types

    old = sorted(OLD_LAYER_KINDS)
    assert remap_legacy_layer_types(old) == [OLD_LAYER_KINDS[name] for name in old]


ALL = DENSE | EXPERTS | RECURRENT | CENTERED | RELATIVES | FOLDERS
# A model of each family and of its variants, with settings that differ from its class's.
MODELS = (
    "llama-yarn-scaled", "mistral-window", "ministral3", "qwen2-window", "qwen3-window-bias",
    "gemma3", "gemma4", "gemma4-small", "gemma4-unified", "granite", "phi3-window",
    *(EXPERTS.keys() - {"qwen3_moe-one", "deepseek_v2", "gemma4", "step3p7"}),
    *(RECURRENT.keys() - {"lfm2-bias", "granite4-dense"}),
    "opt", "falcon", "falcon-new", "falcon-in-turn", "phi", "gpt_neox",
    "internlm3", *RELATIVES,
)  # fmt: skip
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
WIDE = {"hidden_size": 96}
# Removed, because the product refuses unknown variables with its prefix.
CHANGES = int(os.environ.pop("APPLIANCE_TEST_CHANGES", "0"))
SEED = os.environ.pop("APPLIANCE_TEST_CHANGES_SEED", "1")
CHANGED = (
    "llama-yarn-scaled",
    "gemma4-small",
    "qwen3_moe",
    "deepseek_v3",
    "granite4",
    "falcon-new",
)


def make(name: str, make_model: Callable[..., Any]) -> Any:
    model_type, settings = ALL[name]
    return make_model(model_type, **(WIDE if name in CENTERED else SIZES) | settings)


def ours_of(folder: Path, token_ids: list[int]) -> torch.Tensor:
    decoder = load_decoder(open_model(folder), REFERENCE, torch.device("cpu"), torch.float32)
    return logits_of(decoder, token_ids)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_changed_setting_means_what_it_means_to_transformers(
    name: str, make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    model = make(name, make_model)
    folder, oracle = save(model), changed_settings.Oracle(model, token_ids)
    expected = oracle.logits(json.loads((folder / "config.json").read_text()))
    assert expected is not None
    torch.testing.assert_close(ours_of(folder, token_ids), expected, atol=1e-4, rtol=0)
    found, compared = changed_settings.disagreements(
        folder, oracle, lambda: open_model(folder).spec, lambda: ours_of(folder, token_ids)
    )
    assert "\n".join(found) == ""
    assert compared > 6  # some changes are accepted


@pytest.mark.parametrize("name", sorted(MODELS) if CHANGES else CHANGED)
def test_a_setting_changed_at_random_is_refused_by_name_or_means_what_it_means_to_transformers(
    name: str, make_model: Callable[..., Any], save: Callable[[Any], Path], token_ids: list[int]
) -> None:
    folder, judge, config = judged(make(name, make_model), save, token_ids)
    given = random.Random(f"{SEED} {name}")
    known = set(class_tables.settings_of(config["model_type"]))
    changes = list(random_changes(config, known, given, CHANGES or 40))
    found, refused = faults(folder, judge, changes, token_ids)
    assert "\n".join(found) == ""
    assert 0 < refused < len(changes)


# Settings to which 0, null or absence gives a meaning.
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cohere", ("rope_parameters", "rope_type")),
        ("minicpm3", ("rope_parameters", "rope_type")),
        ("ministral3", ("sliding_window",)),
        ("llama4-two", ("no_rope_layers",)),
        ("gemma4", ("per_layer_config",)),
    ],
)
def test_what_is_false_and_of_another_type_is_not_as_absent(
    name: str,
    path: tuple[str, ...],
    make_model: Callable[..., Any],
    save: Callable[[Any], Path],
    token_ids: list[int],
) -> None:
    folder, judge, config = judged(make(name, make_model), save, token_ids)
    values: tuple[Any, ...] = ("", {}, [], None)
    changes = [Change(path[-1], "set", with_setting(config, path, value)) for value in values]
    found, _ = faults(folder, judge, changes, token_ids)
    assert "\n".join(found) == ""


def judged(
    model: Any, save: Callable[[Any], Path], token_ids: list[int]
) -> tuple[Path, Judge, dict[str, Any]]:
    """Save a model; return its folder, a judge of changes of its settings, and its settings."""
    folder, oracle = save(model), changed_settings.Oracle(model, token_ids)
    config = json.loads((folder / "config.json").read_text())
    return folder, Judge(oracle, config, class_tables.settings_of(config["model_type"])), config


def faults(
    folder: Path, judge: Judge, changes: list[Change], token_ids: list[int]
) -> tuple[list[str], int]:
    """Return the faults of changes, and how many changes are refused."""
    unchanged, usual = open_model(folder).spec, ours_of(folder, token_ids)
    found, refused = [], 0
    for change in changes:
        changed_settings.write(change.config, folder)
        ours, refusal = None, ""
        try:
            is_same = open_model(folder).spec == unchanged
            ours = usual if is_same else ours_of(folder, token_ids)
        except ApplianceError as error:
            refusal = str(error)
            refused += 1
        except Exception as error:
            found.append(f"{change}: {type(error).__name__}: {error}")
            continue
        found.append(judge.fault(change, ours, refusal))
    return [fault for fault in found if fault], refused
