"""Absent settings of towers mean what their classes say."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from appliance.errors import UnsupportedModelError
from appliance.model.vision.families.registry import TOWERS, tower_family

KINDS = [kind for family in TOWERS for kind in family.tower_types]


def settings_of(kind: str) -> dict[str, Any]:
    import transformers

    settings: dict[str, Any] = transformers.AutoConfig.for_model(kind).to_dict()
    # A whole without a tower's settings may mean others than a tower without some of them, or none.
    usual = settings["vision_config"] or {"model_type": f"{kind}_vision"}
    tower_type = usual["model_type"]
    return settings | {"vision_config": transformers.AutoConfig.for_model(tower_type).to_dict()}


@pytest.mark.parametrize("kind", KINDS)
def test_absent_settings_are_the_classes(kind: str) -> None:
    settings = settings_of(kind)
    family = tower_family(settings)
    assert family is not None
    whole = family.spec(settings)
    assert settings["vision_config"]["model_type"] == family.tower_types[kind]
    for part in (None, "vision_config"):
        section = settings if part is None else settings[part]
        for key in section:
            if key in ("model_type", "vision_config", "text_config"):  # no file is without
                continue
            fewer = copy.deepcopy(settings)
            del (fewer if part is None else fewer[part])[key]
            assert family.spec(fewer) == whole, (part, key)
    texts = {"text_config": settings["text_config"]}
    assert family.spec({"model_type": kind} | texts) == whole


def test_a_model_without_a_tower_has_none() -> None:
    import transformers

    settings = transformers.AutoConfig.for_model("gemma4").to_dict()
    assert settings["vision_config"] is None
    assert tower_family(settings) is None


def test_another_layer_than_the_last_is_refused() -> None:
    settings = settings_of("mistral3") | {"vision_feature_layer": -2}
    family = tower_family(settings)
    assert family is not None
    with pytest.raises(UnsupportedModelError, match="vision_feature_layer = -2"):
        family.spec(settings)
