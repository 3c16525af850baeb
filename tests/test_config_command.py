"""`appliance config` shows the settings in effect and their sources."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.runs.own_config import WriteConfig, clean_environment, write_config
from typer.testing import CliRunner, Result

from appliance.cli import app

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["clean_environment", "write_config"]
KEY = "0123456789abcdef"
pytestmark = pytest.mark.usefixtures("clean_environment")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", *arguments])


def test_the_origin_is_what_wins(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(
        f"[server]\nport = 1\nmax_queue = 2\napi_key = '{KEY}'\n[engine]\nkv_cache_memory = '2G'\n"
    )
    monkeypatch.setenv("APPLIANCE_PORT", "3")
    result = call("show", "--origin", "--changed")
    assert result.stdout.splitlines() == [
        "[server]",
        "port = 3    # APPLIANCE_PORT",
        f"api_key = (hidden)    # {path}: api_key",
        f"max_queue = 2    # {path}: max_queue",
        "",
        "[engine]",
        f"kv_cache_memory = 2 GiB    # {path}: kv_cache_memory",
    ]
    found = json.loads(call("show", "server", "--json").stdout)
    assert found.keys() == {"server"}
    assert found["server"]["port"] == {"value": "3", "origin": "APPLIANCE_PORT"}
    assert found["server"]["host"]["origin"] == "default"
    assert KEY not in call("show").stdout
    assert call("path").stdout == f"{path}\n"


def test_wrong_settings_are_one_line(write_config: WriteConfig) -> None:
    assert "no configuration file" in str(call("path").exception)
    assert "there are server, engine, top" in str(call("show", "sever").exception)
    write_config("[server]\nprot = 1\n")
    assert "did you mean 'port'" in str(call("show").exception)


def test_a_credential_of_systemd_is_private_whatever_its_mode(
    write_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(f"[server]\napi_key = '{KEY}'\n")
    path.chmod(0o440)
    assert "open to other users" in str(call("show").exception)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(path.parent))
    assert call("show").exit_code == 0


def test_models_are_shown_where_they_differ(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[engine]\nthreads = 2\n[models.a]\nthreads = 2\n[aliases]\nb = "a"\n')
    shown = CliRunner().invoke(app, ["config", "show", "models", "--config", str(file)]).output
    assert shown == "[models.a]\nmodel = a\n\n[aliases]\nb = a\n"
