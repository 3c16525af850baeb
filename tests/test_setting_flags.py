"""Flags that come from the settings' definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from appliance.commands.setting_flags import Flags, with_setting_flags
from appliance.config import EngineConfig, ServerConfig, TopConfig
from appliance.config.setting import Group, Setting, Unit, fields_of
from appliance.errors import ConfigError


class Section(msgspec.Struct, frozen=True, kw_only=True):
    size: Annotated[int, Setting("How much.", Group.KV, unit=Unit.BYTES, low=0, high=2**30)] = 2**20
    model: Annotated[str, Setting("Which.", Group.MODEL)] = "none"
    secret: Annotated[str, Setting("Not seen.", Group.KV, has_flag=False)] = "x"
    quick: Annotated[bool, Setting("Be quick.", Group.STEPS)] = True


def call(*arguments: str) -> tuple[Mapping[str, object], str]:
    taken: list[tuple[Mapping[str, object], str]] = []
    app = typer.Typer()

    @app.command()
    @with_setting_flags(Section)
    def command(flags: Flags, model: str = "", loud: bool = False) -> None:
        taken.append((flags, model))

    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return taken[0] if taken else ({}, result.output)


def test_what_is_written_comes_through_as_text() -> None:
    nothing = {"size": None, "model": None, "quick": None}
    assert call() == (nothing, "")
    assert call("--size", "2G", "--model", "a") == ({**nothing, "size": "2G", "model": "a"}, "")
    assert call("--quick")[0]["quick"] is True
    assert call("--no-quick")[0]["quick"] is False


def test_a_switch_cannot_be_on_and_off() -> None:
    with pytest.raises(ConfigError, match="--quick and --no-quick were given"):
        call("--quick", "--no-quick")


def test_help_has_groups_defaults_and_one_name_of_a_switch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, text = call("--help")
    for words in ("─ KV cache ─", "─ Context and steps ─", "--size", "SIZE", "1 MiB", "--quick"):
        assert words in text
    assert "Be quick; --no-quick does not." in text
    assert "secret" not in text


def test_serve_and_top_have_all_flags_that_they_had() -> None:
    had = (
        "host port served_model_name max_queue max_queue_seconds device dtype kv_cache_dtype "
        "max_model_len max_num_seqs max_num_batched_tokens block_size kv_cache_memory "
        "gpu_memory_utilization cuda_graphs threads prefix_caching api_key_file model "
        "share_prefixes_between_keys kv_disk kv_disk_size kv_host_memory show_prompts kernels "
        "cpu_isa min_quality url colors theme web_host web_port"
    )
    fields = {
        name: field
        for section in (ServerConfig, EngineConfig, TopConfig)
        for name, field in fields_of(section).items()
    }
    assert all(fields[name].setting.has_flag for name in had.split())
    assert not fields["api_key"].setting.has_flag, "other users see the arguments of a process"
