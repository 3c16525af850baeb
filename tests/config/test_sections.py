"""The definitions of all settings are complete, and agree with those of other rooms."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
import pytest

from appliance.config import SECTIONS, EngineConfig, ServerConfig, TopConfig, known_keys
from appliance.config.setting import Field, Group, Setting, fields_of
from appliance.errors import ConfigError
from appliance.kernels.cache.kv_format import KVFormat
from appliance.tui.terminal import DisplaySettings

EVERY = [field for section in SECTIONS.values() for field in fields_of(section).values()]


def test_sections_do_not_share_names() -> None:
    names = [field.name for field in EVERY]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("field", EVERY, ids=lambda field: field.name)
def test_a_setting_says_all_that_is_needed(field: Field) -> None:
    setting = field.setting
    assert setting.help.endswith(".")
    assert "[" not in setting.help, "rich would take it for markup"
    assert (setting.low is None) == (setting.high is None)
    is_number = field.type in (int, float)
    assert not is_number or setting.choices or setting.low is not None
    assert field.default_text or field.default in (None, {}), "help says what the default is"
    if field.is_optional and is_number:
        assert setting.default_is
    field.check(field.default, field.name)


@pytest.mark.parametrize("field", EVERY, ids=lambda field: field.name)
def test_the_default_can_be_written(field: Field) -> None:
    if field.default not in (None, "", {}):
        assert field.read(field.shown(field.default), "") == field.default


def test_a_struct_checks_its_values() -> None:
    with pytest.raises(ConfigError, match="port must be between 0 and 65535; got 65536"):
        ServerConfig(port=65536)
    with pytest.raises(ConfigError, match="kv_cache_memory must be between 16 KiB"):
        EngineConfig(kv_cache_memory=1)
    with pytest.raises(ConfigError, match="theme must be one of"):
        TopConfig(theme="pink")
    assert not known_keys(ServerConfig(api_key=""))


class Listed(msgspec.Struct):
    friends: Annotated[list[str], Setting("Names.", Group.MODEL)] = []


def test_a_type_that_no_flag_can_have_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"friends: .* lists are text"):
        fields_of(Listed)


def test_a_key_is_never_shown() -> None:
    field = fields_of(ServerConfig)["api_key"]
    for value in ("short7c", "with two words", 12345678):
        with pytest.raises(ConfigError, match="APPLIANCE_API_KEY") as caught:
            field.read(value, field.variable)
        assert str(value) not in str(caught.value)


@pytest.mark.parametrize("kv_format", list(KVFormat), ids=lambda kv_format: kv_format.value)
def test_every_format_of_the_kv_cache_can_be_asked_for(kv_format: KVFormat) -> None:
    assert EngineConfig(kv_cache_dtype=kv_format.value).kv_cache_dtype == kv_format.value


def test_every_look_of_the_dashboard_can_be_asked_for_and_no_other() -> None:
    fields = fields_of(TopConfig)
    for colors in fields["colors"].setting.choices:
        for theme in fields["theme"].setting.choices:
            assert DisplaySettings.of(str(colors), str(theme)).theme == theme
    from appliance.tui.terminal import SCHEMES, Colors

    assert set(fields["colors"].setting.choices) == {color.value for color in Colors}
    assert set(fields["theme"].setting.choices) == set(SCHEMES)


def test_a_bound_is_named_in_its_unit() -> None:
    field = fields_of(EngineConfig)["kv_disk_size"]
    assert field.bounds == "between 1 MiB and 1024 TiB"
    without = replace(field, setting=replace(field.setting, low=None, high=None))
    assert without.bounds == ""
