"""Patterns of adapters match as PEFT's do, and always end after bounded work."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.errors import AdapterError
from appliance.model.adapters import peft_settings
from appliance.model.adapters.peft_settings import LoraSettings, read_settings

LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.10.down_proj")
NAMES = [
    f"{prefix}.{number}.{linear}"
    for prefix in ("model.layers", "model.language_model.layers", "visual.blocks", "transformer.h")
    for number in (0, 1, 10)
    for linear in LINEARS
] + ["lm_head", "model.embed_tokens", "q_proj"]
TARGETS: list[Any] = [
    # as unsloth's get_peft_regex writes them
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|proj|linear).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|down_proj)))",
    # as ms-swift's get_multimodal_target_regex does
    r"^(model\.language_model(?=\.).*\.(q_proj|gate_proj))$",
    r"^(?!.*visual).*\.(q_proj|o_proj)$",
    r".*\.(?<!mlp\.)experts\.\d+\.down_proj|(.*)_proj",
    r"(?i).*\.Q_PROJ",
    r".*layers\.(\d)\.(?:\w+\.)+\w+_proj",
    ["q_proj", "experts.10.down_proj"],
]
LAYERS: list[tuple[Any, Any]] = [
    (None, None),
    ([1], None),
    ([1, 10], "layers"),
    ([0], ["h", "blocks"]),
    ([10], r"(?:language_model|visual)\.\w+"),
]
KEYS = [
    ["q_proj", "mlp.gate_proj"],
    [r"layers\.1\.self_attn\.q_proj", "layers.10.*"],
    [r"(?:.*\.)?h\.\d+\.mlp\..*", ".*down_proj"],
]


def settings_of(**fields: Any) -> LoraSettings:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["x"], **fields}
    return read_settings(Path("adapter_config.json"), json.dumps(config).encode())


@pytest.mark.parametrize("targets", TARGETS, ids=lambda one: str(one)[:20])
def test_names_match_as_peft_s(targets: Any) -> None:
    from peft.tuners.tuners_utils import check_target_module_exists  # PEFT takes seconds

    for layers, before in LAYERS if isinstance(targets, list) else LAYERS[:1]:
        fields = {
            "target_modules": targets,
            "exclude_modules": r".*\.h\.1\..*",
            "layers_to_transform": layers,
            "layers_pattern": before,
        }
        settings = settings_of(**fields)
        config: Any = SimpleNamespace(**fields)
        for name in NAMES:
            found = check_target_module_exists(config, name)
            is_wanted = bool(found) and type(found).__name__ != "_ExcludedModule"
            assert settings.wants(name) == is_wanted, (fields, name)


@pytest.mark.parametrize("keys", KEYS, ids=str)
def test_ranks_are_of_the_keys_that_peft_finds(keys: list[str]) -> None:
    from peft.utils.other import get_pattern_key

    ranks = {key: number for number, key in enumerate(keys, 10)}
    settings = settings_of(rank_pattern=ranks)
    for name in NAMES:
        assert settings.rank_of(name) == ranks.get(get_pattern_key(keys, name), 4), name


FOREVER = [
    r"(.|.)*[YZ]",
    "(.*)" * 200 + "[YZ]",
    r"(?:[a-z_.]+){0,60}[YZ]",
    "(?:.?){5000}" * 9 + "Y",
]


@pytest.mark.parametrize("pattern", FOREVER, ids=lambda one: one[:15])
@pytest.mark.parametrize(
    "field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"]
)
def test_work_ends(field: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` would take years for each pattern."""
    monkeypatch.setattr(peft_settings, "SECONDS", 0.05)
    begin = time.thread_time()
    try:
        settings = settings_of(**{field: {pattern: 9} if field.endswith("_pattern") else pattern})
        for name in NAMES:
            wanted, scale = settings.wants(f"{name}Y"), settings.scale_of(name)
            assert isinstance(wanted, bool)
            assert scale == 2
    except AdapterError as error:
        assert "patterns take more than" in str(error)  # noqa: PT017 - others end at once
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize(
    "pattern", ["(" * 20_000 + ")" * 20_000, "a" * 10**5, "(?<a", "a{9999999999999999999999}", "["]
)
def test_what_no_expression_may_be_is_refused_at_once(pattern: str) -> None:
    with pytest.raises(AdapterError, match=r"name the linears in a list instead"):
        settings_of(target_modules=pattern)
